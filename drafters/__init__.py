"""Drafters for speculative decoding: trees, laws, targets and every drafter family.

Shape letters used in docstrings: B or R rows of a batch, T sequence, N drafted nodes, M tokens or
positions, V vocabulary, K draft vocabulary, taps or depths, D hidden width, L layers, H heads.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drafters.checkpoint import load_drafter, save_drafter
    from drafters.target import Target

__all__ = ["Target", "load_drafter", "save_drafter"]

_HOMES = {
    "Target": "drafters.target",
    "load_drafter": "drafters.checkpoint",
    "save_drafter": "drafters.checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use: small commands then start without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'drafters' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

"""Facts: what a target's figures are filed under, and how large a drafter is."""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from drafters import embedded
from drafters.int8 import quantisation
from drafters.target import Target

_FLOATS = {"F64", "F32", "F16", "BF16"}  # tables of ids are no parameters


def target_facts(target: Target) -> dict[str, Any]:
    """Return what figures of a target are filed under."""
    method = quantisation(target.model.config)
    return {
        "name": target.name,
        "title": _title(target.name) + (f", {method}" if method else ""),
        "quantisation": method,
        "architecture": type(target.model).__name__,
        "parameters": parameters(target),
        "dtype": dtype_name(target),
        "engine": target.engine,
    }


def _title(name: str) -> str:
    """Return what tables call a target: the folder's name unless it is the embedded one."""
    path = Path(name)
    return embedded.TITLE if path.resolve() == embedded.cached_folder() else path.name


def dtype_name(target: Target) -> str:
    """Return what a target computes in, such as float32."""
    return str(target.dtype).removeprefix("torch.")


def parameters(target: Target) -> int:
    """Return how many values a target has, those in whole numbers too."""
    rounded = (b for b in target.model.buffers() if b.dtype == torch.int8)
    return sum(w.numel() for w in (*target.model.parameters(), *rounded))


def stored_values(folder: Path) -> int:
    """Return how many floating-point values a folder's safetensors hold."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                total += math.prod(part.get_shape()) * (part.get_dtype() in _FLOATS)
    return total

"""Proposals: how files of the speculators library say what is proposed a round, and for whom."""

from typing import Any

from drafters.errors import UserError
from drafters.formats.foreign import Foreign
from drafters.target import Target


def proposing(algorithm: str, tokens: int, target: Target) -> dict[str, Any]:
    """Return the section for a greedy chain of this many tokens."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": target.name, "architectures": [type(target.model).__name__]},
    }


def proposed(foreign: Foreign) -> int:
    """Return how many tokens a round are proposed: the depths that it was trained for.

    Raises:
        UserError: if that is no number of tokens.
    """
    methods = foreign.section("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    count = first.get("speculative_tokens", 3) if isinstance(first, dict) else first
    if type(count) is not int or count < 1:
        raise UserError(f"{foreign.folder}: speculative_tokens is {count!r}: give 1 or more")
    return count

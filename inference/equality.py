"""Equality: how many greedy outputs equal plain decoding's, and how often rounding parts them."""

from dataclasses import dataclass
from typing import Any

from inference.bench import Measurement
from inference.compare import Difference, compare
from inference.tally import Tally

KEYS = (
    "identical",
    "near_ties",
    "near_ties_per_thousand",
    "compared_tokens",
    "different",
    "largest_gap",
)


@dataclass(frozen=True)
class Compared:
    """One prompt's outputs: their difference, None if they are equal, and how far they agree.

    Args:
        difference: the worst over the repeats.
        tokens: up to the first difference, which is among them; all where there is none.
    """

    difference: Difference | None
    tokens: int


def equality(measured: Measurement, own: Tally, plain: Tally) -> dict[str, Any]:
    """Return how many greedy outputs equal plain decoding's; None where outputs were drawn."""
    if not measured.settings.warp.greedy:
        return dict.fromkeys(KEYS)
    found = [_compared(measured, own, plain, prompt) for prompt in range(len(measured.ids))]
    differences = [one.difference for one in found if one.difference is not None]
    gaps = [d.gap for d in differences if d.gap is not None]
    ties, tokens = sum(d.near_tie for d in differences), sum(one.tokens for one in found)
    return {
        "identical": len(found) - len(differences),
        "near_ties": ties,
        "near_ties_per_thousand": 1000 * ties / tokens,
        "compared_tokens": tokens,
        "different": len(differences) - ties,
        "largest_gap": max(gaps, default=None),
    }


def _compared(measured: Measurement, own: Tally, plain: Tally, prompt: int) -> Compared:
    pairs = zip(own.outputs(prompt), plain.outputs(prompt), strict=True)
    distinct = sorted({(tuple(a), tuple(b)) for a, b in pairs})
    found = [compare(measured.target, measured.ids[prompt], a, b) for a, b in distinct]
    differences = [d for d in found if d is not None]
    if not differences:
        return Compared(None, len(distinct[0][0]))
    worst = min(differences, key=lambda d: d.near_tie)
    return Compared(worst, worst.index + 1)

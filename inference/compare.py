"""Compare: whether two greedy outputs are the same, and whether a difference is rounding.

A forward over several tokens adds in another order than one over a single token, so an argmax may
flip where two logits are all but equal. Nothing else excuses a difference.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafters.base import Features
from drafters.target import Target

_FLOAT32_GAP = 1e-4
_BFLOAT16_BITS = 7  # explicit bits of the significand


@dataclass(frozen=True)
class Difference:
    """Where two greedy outputs part.

    Args:
        index: of the first differing token in the output.
        gap: between the two tokens' logits in one plain forward over what is common; None where
            one output ends inside the other.
        near_tie: whether rounding explains it.
    """

    index: int
    gap: float | None
    near_tie: bool


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the first index where two outputs differ, None if they are equal."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


@torch.inference_mode()
def compare(
    target: Target, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> Difference | None:
    """Compare two greedy outputs of one prompt; None if they are equal.

    A near-tie is a gap below 1e-4 (float32), or below one bfloat16 step of the larger logit.
    """
    index = first_difference(ours, theirs)
    if index is None:
        return None
    if index == min(len(ours), len(theirs)):
        return Difference(index, None, near_tie=False)
    prefix = torch.tensor([*prompt, *ours[:index]])
    output = target.prefill([prefix], target.new_cache(1, len(prefix)), Features())[0]
    assert output is not None
    pair = output.logits[0, [ours[index], theirs[index]]].double()
    gap = abs(float(pair[0] - pair[1]))
    return Difference(index, gap, near_tie=gap < tolerance(target.dtype, float(pair.abs().max())))


def tolerance(dtype: torch.dtype, logit: float) -> float:
    """Return the gap below which two logits are a near-tie in this dtype.

    >>> tolerance(torch.bfloat16, 20.0)
    0.125
    """
    if dtype != torch.bfloat16:
        return _FLOAT32_GAP
    return 2.0 ** (math.frexp(logit)[1] - 1 - _BFLOAT16_BITS)

"""Ties: whether rounding explains that a row is not what it is alone.

A forward over many rows adds in another order than one over a single row. Greedy tokens may part
where two logits are closer than 1e-4 (inference/compare.py). A drawn token is the place of a coin
in the running sum F of the law; logits moved by that much against each other move F by no more than
F (1 - F) 1e-4 / temperature, so two draws may part where the coin lies that close to the border of
both their tokens, and nowhere else.
"""

from collections.abc import Sequence

import torch

from drafters.base import Features
from drafters.target import Target
from inference.compare import compare, first_difference, tolerance
from tests.load.soak import Load, Served


def excused(load: Load, served: Served, alone: Sequence[int]) -> bool:
    """Tell whether the first token at which a row parts from itself alone is a near-tie.

    Drafts must be point masses: then every token takes one number from its row's coin.
    """
    if load.warp.greedy:
        found = compare(load.target, served.prompt, served.output, alone)
        return found is None or found.near_tie
    index = first_difference(served.output, alone)
    if index is None:
        return True
    if index == min(len(served.output), len(alone)):
        return False
    logits = _next(load.target, [*served.prompt, *served.output[:index]])
    coin = served.request.random.verify
    shares = [float(coin.uniform(()).double()) for _ in range(index + 1)]
    ends = load.warp.laws(logits).law(0).weights.double().cumsum(0)
    gap = tolerance(load.target.dtype, float(logits.abs().max())) / load.warp.temperature
    return all(near(ends, token, shares[-1], gap) for token in (served.output[index], alone[index]))


def near(ends: torch.Tensor, token: int, share: float, gap: float) -> bool:
    """Tell whether a coin draws a token, or does after logits have moved by a gap.

    Args:
        ends: [V] running sum of the law, float64.
        token: the token.
        share: the coin, from 0 to 1.
        gap: between two logits, divided by the temperature.
    """
    share *= float(ends[-1])
    low, high = float(ends[token - 1]) if token else 0.0, float(ends[token])
    return low - gap * low * (1 - low) <= share <= high + gap * high * (1 - high)


@torch.inference_mode()
def _next(target: Target, ids: list[int]) -> torch.Tensor:
    """Return the logits [1, V] after these tokens, from one plain forward."""
    cache = target.new_cache(1, len(ids))
    output = target.prefill([torch.tensor(ids)], cache, Features())[0]
    assert output is not None
    return output.logits


@torch.inference_mode()
def strays(target: Target, ids: Sequence[int], prompt: int) -> int:
    """Count tokens after the prompt that are not the best of one forward over them all.

    Those within a near-tie of the best do not count.
    """
    given = torch.tensor([list(ids)])
    document, position = torch.zeros_like(given), torch.arange(len(ids))[None]
    _, last = target.forward_batch(given, document, position, Features(last=True))
    found = 0
    for start in range(prompt - 1, len(ids) - 1, 256):
        chosen = given[0, start + 1 : start + 257].to(last.device)
        logits = target.head(last[0, start : start + len(chosen)]).double()
        best = logits.amax(-1)
        gaps = best - logits.gather(-1, chosen[:, None])[:, 0]
        allowed = tolerance(target.dtype, float(best.abs().max()))
        found += int((gaps >= allowed).sum())
    return found

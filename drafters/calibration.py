"""Calibration: how a stated confidence is read so that it tells what is accepted.

A chain is taken as far as every token of it is, so what has to be right is the product of the
chances down to each depth. One temperature a depth is fitted from left to right.
Source: DSpark (DeepSeek, June 2026), sequential temperature scaling.
"""

import torch
from torch import Tensor

_BINS = 10
_GRID = sorted((2.0 ** (step / 8) for step in range(-24, 25)), key=lambda t: abs(t - 1))


def calibration_error(stated: Tensor, taken: Tensor) -> Tensor:
    """Return the mean distance of what was stated and what came of it, by bins of the former.

    Args:
        stated: [N] chances.
        taken: [N] what share was accepted, 0 to 1.

    >>> float(calibration_error(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])))
    0.0
    """
    place = (stated * _BINS).long().clamp_max(_BINS - 1)
    distance = torch.zeros(_BINS, dtype=stated.dtype, device=stated.device)
    return distance.index_add(0, place, stated - taken).abs().sum() / len(stated)


def sequential_temperatures(logits: Tensor, taken: Tensor) -> Tensor:
    """Return the temperature of each depth [K] under which survival is told best.

    Args:
        logits: [N, K] of confidence, N chains of K depths.
        taken: [N, K] chance that each depth is accepted where those above were.
    """
    stated = torch.ones_like(taken[:, 0])
    reached = torch.ones_like(stated)
    found: list[float] = []
    for logit, share in zip(logits.unbind(1), taken.unbind(1), strict=True):
        reached = reached * share
        best = min(
            _GRID,  # of equals the one nearest to 1
            key=lambda t: float(calibration_error(stated * (logit / t).sigmoid(), reached)),
        )
        found.append(best)
        stated = stated * (logit / best).sigmoid()
    return torch.tensor(found)

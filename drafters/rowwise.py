"""Losses of rows of logits together with their slopes, in one pass over each block of rows.

A row of 16384 logits is read about ten times on its way to a loss, its metrics and its gradient.
Done tensor by tensor that was half of a training step on a CPU, as dear as all matrix products; on
blocks that stay in the cache it is a fifth. So the slope d loss / d logits is made in the forward
pass and is all that is kept for the backward one.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BLOCK_VALUES = 2**19  # logits of a block: 2 MB


class Rows(NamedTuple):
    """What is known of m rows of logits.

    loss: [m] times the row's weight; alpha: [m] at temperature 1; guess: [m] most likely index.
    """

    loss: Tensor
    alpha: Tensor
    guess: Tensor


class Goal(NamedTuple):
    """A cross entropy's fixed target: share * p + a weight on some single tokens.

    p: [m, K] probabilities on K ids; share: [m] what they are multiplied by.
    mass: [m] sum of share * p and of the weights.
    single: pairs of index [m] and weight [m].
    """

    p: Tensor
    share: Tensor
    mass: Tensor
    single: list[tuple[Tensor, Tensor]]


# Of logits [b, K] of the rows in a slice: their losses [b], differentiable.
Formula = Callable[[Tensor, slice], Tensor]


def cross_entropy_rows(logits: Tensor, goal: Goal, plain: Tensor) -> Rows:
    """Return the cross entropy of each row's softmax under its goal, whose mass is its weight.

    Args:
        logits: [m, K] float32.
        goal: on the same ids.
        plain: [m, K] the target's law at temperature 1, for alpha.
    """

    def block(z: Tensor, rows: slice, slope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        top, guess = z.max(-1, keepdim=True)
        q = (z - top).exp_()
        total = q.sum(-1, keepdim=True)
        q.div_(total)
        loss = goal.mass[rows] * (total.log() + top)[:, 0]
        loss -= goal.share[rows] * torch.linalg.vecdot(goal.p[rows], z)
        for index, weight in goal.single:
            loss -= weight[rows] * z.gather(-1, index[rows, None])[:, 0]
        alpha = torch.minimum(plain[rows], q).sum(-1)
        if slope is not None:
            torch.mul(q, goal.mass[rows, None], out=slope)
            slope.addcmul_(goal.p[rows], goal.share[rows, None], value=-1)
            for index, weight in goal.single:
                slope.scatter_add_(-1, index[rows, None], -weight[rows, None])
        return loss, alpha, guess[:, 0]

    return Rows(*_RowLoss.apply(logits, block))


def formula_rows(logits: Tensor, formula: Formula, plain: Tensor) -> Rows:
    """Return any differentiable loss of each row.

    Args:
        logits: [m, K] float32.
        formula: see there.
        plain: [m, K] the target's law at temperature 1, for alpha.
    """

    def block(z: Tensor, rows: slice, slope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        with torch.set_grad_enabled(slope is not None):
            leaf = z.detach().requires_grad_(slope is not None)
            loss = formula(leaf, rows)
            if slope is not None:
                slope.copy_(torch.autograd.grad(loss.sum(), leaf)[0])
        alpha = torch.minimum(plain[rows], z.softmax(-1)).sum(-1)
        return loss.detach(), alpha, z.argmax(-1)

    return Rows(*_RowLoss.apply(logits, block))


class _RowLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        block: Callable[[Tensor, slice, Tensor | None], tuple[Tensor, Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        slope = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        parts = [
            block(logits[rows], rows, None if slope is None else slope[rows])
            for rows in _blocks(logits)
        ]
        loss, alpha, guess = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.mark_non_differentiable(alpha, guess)
        if slope is not None:
            ctx.save_for_backward(slope)
        return loss, alpha, guess

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        # the usual gradient of a sum: spares a copy as large as the logits
        if bool((grads[0] == 1).all()):
            return slope, None
        return slope * grads[0][:, None], None


def _blocks(logits: Tensor) -> Iterator[slice]:
    size = max(1, _BLOCK_VALUES // logits.shape[-1])
    for start in range(0, len(logits), size):
        yield slice(start, start + size)

"""Parallel drafters: one forward gives the laws of all depths, and growth looks them up.

A law may be the same below every node of its depth (a marginal), or be corrected once the token
before is known (a conditional); what corrects it belongs to the drafter.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from drafters.errors import UserError
from drafters.frontier import Frontier
from drafters.growth import Growth

# Of a depth (0: the root's) and its tokens [R, F].
Conditional = Callable[[int, Tensor], Tensor]
Confidence = Callable[[int, Tensor], Tensor | None]


def check_levels(growth: Growth, count: int, what: str) -> None:
    """Refuse a growth that is deeper than the laws that one forward gives.

    Raises:
        UserError: says how many there are.
    """
    if growth.depth > count:
        raise UserError(
            f"the trees are {growth.depth} levels deep and this drafter has {count} {what}: give "
            f"gamma, depth or levels of branching from 1 to {count}"
        )


class ParallelGuesser:
    """One round of a parallel drafter.

    Args:
        marginals: [depths, R, K] logits of every depth.
        ids: the draft vocabulary [K]; None: the target's own.
        roots: [R, 1] int64, for the two that follow.
        conditional: returns the logits [R, F, K] after tokens of a depth; None: the marginals.
        confidence: returns how likely the draft after each is accepted [R, F]; None: unknown.
    """

    def __init__(
        self,
        marginals: Tensor,
        ids: Tensor | None,
        roots: Tensor | None = None,
        conditional: Conditional | None = None,
        confidence: Confidence | None = None,
    ) -> None:
        """Start at the roots."""
        self.marginals, self.ids = marginals, ids
        self._conditional, self._confidence = conditional, confidence
        empty = torch.zeros(marginals.shape[1], 1, dtype=torch.int64, device=marginals.device)
        self._asked = 0, empty if roots is None else roots

    def root_logits(self) -> Tensor:
        """Return the first depth's logits [R, K]."""
        return self._logits()[:, 0]

    def step(self, frontier: Frontier) -> Tensor:
        """Return the next depth's logits [R, F, K]; of a marginal one copy, seen F times."""
        self._asked = frontier.depth, frontier.tokens
        return self._logits()

    def confidence(self) -> Tensor | None:
        """Return the chance [R, F] that a draft after each node asked for last is accepted."""
        return None if self._confidence is None else self._confidence(*self._asked)

    def _logits(self) -> Tensor:
        depth, tokens = self._asked
        if self._conditional is not None:
            return self._conditional(depth, tokens)
        return self.marginals[depth][:, None].expand(-1, tokens.shape[1], -1)

"""Parallel drafters: one forward gives the laws of all depths, and growth looks them up."""

from torch import Tensor

from drafters.errors import UserError
from drafters.frontier import Frontier
from drafters.growth import Growth


class ParallelGuesser:
    """One round of a parallel drafter: the law of a depth is the same below every node.

    Args:
        marginals: [depths, R, K] logits of every depth.
        ids: the draft vocabulary [K]; None: the target's own.
    """

    def __init__(self, marginals: Tensor, ids: Tensor | None) -> None:
        """Hold the laws."""
        self.marginals, self.ids = marginals, ids

    def root_logits(self) -> Tensor:
        """Return the first depth's logits [R, K]."""
        return self.marginals[0]

    def step(self, frontier: Frontier) -> Tensor:
        """Return the logits [R, F, K] of the depth below the frontier's."""
        return self.marginals[frontier.depth][:, None].expand(-1, frontier.tokens.shape[1], -1)


def check_levels(growth: Growth, count: int, what: str) -> None:
    """Refuse a growth that is deeper than the laws that a drafter has.

    Raises:
        UserError: says how many there are.
    """
    if growth.depth > count:
        raise UserError(
            f"the trees are {growth.depth} levels deep and this drafter has {count} {what}: give "
            f"gamma, depth or levels of branching from 1 to {count}"
        )

"""Guessing of drafters whose law of a depth is the same below every node: all known at once."""

from torch import Tensor

from drafters.errors import UserError
from drafters.frontier import Frontier
from drafters.growth import Growth


class MarginalGuesser:
    """One round of a drafter that guesses all depths in parallel.

    Args:
        logits: [depths, R, K]; the first is that of the token after each root.
        ids: [K] the draft vocabulary; None: the target's own.
    """

    def __init__(self, logits: Tensor, ids: Tensor | None) -> None:
        """Hold the logits."""
        self.logits, self.ids = logits, ids

    def root_logits(self) -> Tensor:
        """Return the first depth's logits [R, K]."""
        return self.logits[0]

    def step(self, frontier: Frontier) -> Tensor:
        """Return the logits [R, F, K] of the depth below the frontier's."""
        return self.logits[frontier.depth][:, None].expand(-1, frontier.tokens.shape[1], -1)


def check_levels(growth: Growth, most: int, what: str) -> None:
    """Refuse a growth of more levels than a drafter has learned to guess.

    Args:
        growth: the shape of the trees.
        most: levels that the drafter can guess.
        what: it has so many of: "heads".

    Raises:
        UserError: says how many levels are allowed.
    """
    if growth.depth > most:
        raise UserError(
            f"the trees are {growth.depth} levels deep and this drafter has {most} {what}: give "
            f"gamma, depth or levels of branching from 1 to {most}"
        )

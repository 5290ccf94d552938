"""Prices: what drafting and verifying cost, in plain rounds, as a growth policy reads them."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from drafters.errors import UserError

_BEYOND = 64  # sizes behind the last measured one that are looked up, not computed


@dataclass(frozen=True)
class Prices:
    """Measured costs of one drafter on one target; 1 is a round of plain decoding.

    Args:
        verify: (n, cost of a round that verifies n tokens a row and drafts nothing), n ascending
            from 1, where the cost is 1. Noise that lets a larger n cost less is evened out.
        first: cost of drafting one level, everything that a round with drafts adds included.
        level: cost of every further level.

    Raises:
        UserError: if the sizes do not ascend from 1.
    """

    verify: tuple[tuple[int, float], ...]
    first: float = 0.0
    level: float = 0.0

    def __post_init__(self) -> None:
        """Check the sizes and make the costs rise."""
        sizes = [n for n, _ in self.verify]
        if not sizes or sizes[0] != 1 or any(a >= b for a, b in pairwise(sizes)):
            raise UserError(f"prices for {sizes} tokens: give sizes ascending from 1")
        costs = accumulate((cost for _, cost in self.verify), max)
        object.__setattr__(self, "verify", tuple(zip(sizes, costs, strict=True)))

    @cached_property
    def _whole(self) -> list[float]:
        return [line(self.verify, n) for n in range(int(self.verify[-1][0]) + _BEYOND)]

    def tokens(self, n: float) -> float:
        """Return the cost of verifying n tokens a row, root included: straight lines between.

        Sizes are whole numbers, so lines between whole numbers are the same; asked for every node.

        >>> Prices(((1, 1.0), (5, 1.0), (9, 2.0))).tokens(7)
        1.5
        """
        whole = int(n)
        if whole + 1 >= len(self._whole):
            return line(self.verify, n)
        below = self._whole[whole]
        return below + (self._whole[whole + 1] - below) * (n - whole)

    def drafting(self, levels: int) -> float:
        """Return the cost of drafting so many levels."""
        return self.first + self.level * (levels - 1) if levels else 0.0


def line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return y at x on straight lines between points (x, y) ascending.

    Before the first point y stays what it is there; after the last it goes on as steeply as before.
    """
    if len(points) == 1:
        return points[0][1]
    x = max(x, points[0][0])
    place = min(bisect_right([a for a, _ in points], x), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

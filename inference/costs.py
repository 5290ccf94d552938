"""Costs: what a target's and a drafter's work takes on one machine, and between what was measured.

T(n) is the target's forward over n new tokens a row, over a cached prefix. A table holds T(n) for
several batch sizes and contexts, and each drafter's own time; inference/meter.py measures,
inference/cost_store.py keeps, inference/forecast.py says what follows for a drafter's speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from statistics import fmean, median

import numpy as np

from drafters.growth.prices import Prices, line

Grid = Mapping[tuple[int, ...], float]  # seconds by coordinates; need not be complete


@dataclass(frozen=True)
class Costs:
    """T(n) of one or many rows over one context.

    Args:
        times: what was timed, in seconds, by n ascending; 1 is among them.
    """

    times: Mapping[int, Sequence[float]]

    @cached_property
    def seconds(self) -> dict[int, float]:
        """Return the medians by n."""
        return {n: median(times) for n, times in self.times.items()}

    @property
    def step(self) -> float:
        """Return T(1), the seconds of a plain forward."""
        return self.seconds[1]

    def of(self, n: float) -> float:
        """Return T(n) in seconds, between the measured sizes by straight lines."""
        return float(np.interp(n, list(self.seconds), list(self.seconds.values())))

    def relative(self) -> dict[str, float]:
        """Return T(n) / T(1) by n."""
        return {str(n): seconds / self.step for n, seconds in self.seconds.items()}


@dataclass(frozen=True)
class DraftCosts:
    """A drafter's time in a round, by (width, rows, context); width: nodes expanded a level.

    Args:
        first: seconds of proposing one level, the encoding of what became final included.
        level: seconds of every further level.
        overhead: seconds of the engine's own work in a round with drafts.
    """

    first: Grid
    level: Grid
    overhead: Grid

    def merged(self, newer: "DraftCosts") -> "DraftCosts":
        """Return these costs with what was measured since."""
        return DraftCosts(
            {**self.first, **newer.first},
            {**self.level, **newer.level},
            {**self.overhead, **newer.overhead},
        )


@dataclass(frozen=True)
class Load:
    """What a round works on: rows, and tokens that each has cached."""

    rows: int = 1
    context: int = 0


@dataclass(frozen=True)
class Shape:
    """A tree's size: levels, nodes drafted a row, nodes expanded a level. Zeros: no drafts."""

    levels: int = 0
    nodes: float = 0
    width: int = 1


@dataclass(frozen=True)
class CostTable:
    """What was measured of one target on one machine in one dtype.

    Args:
        verify: T(n) in seconds by (rows, context, n).
        overhead: seconds of the engine's own work in a plain round, by (rows, context).
        drafters: by what a drafter is called; see inference.cost_store.drafter_key.
    """

    verify: Grid
    overhead: Grid
    drafters: Mapping[str, DraftCosts] = field(default_factory=dict[str, DraftCosts])

    def forward(self, n: float, load: Load) -> float:
        """Return T(n) in seconds."""
        return between(self.verify, (load.rows, load.context, n))

    def plain(self, load: Load) -> float:
        """Return the seconds of a plain round."""
        return self.forward(1, load) + between(self.overhead, (load.rows, load.context))

    def round(self, drafter: str, shape: Shape, load: Load, ready: float = 0.0) -> float:
        """Return the seconds of a round in which this drafter drafts; a plain one's at least.

        Args:
            drafter: its key.
            shape: that it drafts in.
            load: rows and context.
            ready: see `overlapped`; above 0 where the drafter has a device of its own.

        Raises:
            KeyError: if the drafter was not measured.
        """
        if not shape.levels:
            return self.plain(load)
        costs, where = self.drafters[drafter], (shape.width, load.rows, load.context)
        draft = between(costs.first, where) + between(costs.level, where) * (shape.levels - 1)
        both = overlapped(draft, self.forward(shape.nodes + 1, load), ready)
        whole = both + between(costs.overhead, where)
        return max(whole, self.plain(load))

    def prices(self, drafter: str, width: int, load: Load) -> Prices:
        """Return what a growth policy reads: the same costs in plain rounds.

        Raises:
            KeyError: if the drafter was not measured.
        """
        plain, bare = self.plain(load), between(self.overhead, (load.rows, load.context))
        sizes = sorted({n for _, _, n in self.verify})
        costs, where = self.drafters[drafter], (width, load.rows, load.context)
        more = between(costs.overhead, where) - bare
        return Prices(
            verify=tuple((n, (self.forward(n, load) + bare) / plain) for n in sizes),
            first=max(0.0, between(costs.first, where) + more) / plain,
            level=max(0.0, between(costs.level, where)) / plain,
        )

    def covers(self, drafter: str, width: int, rows: int) -> bool:
        """Tell whether this width and number of rows lie within what was measured of a drafter."""
        if drafter not in self.drafters:
            return False
        counts = {rows for _, rows, _ in self.drafters[drafter].first}
        widths = {width for width, _, _ in self.drafters[drafter].first}
        forwards = {rows for rows, _, _ in self.verify}
        return min(widths) <= width <= max(widths) and all(
            min(measured) <= rows <= max(measured) for measured in (counts, forwards)
        )

    def merged(self, newer: "CostTable") -> "CostTable":
        """Return this table with what was measured since; a drafter's entries are added up too."""
        drafters = dict(self.drafters)
        for name, costs in newer.drafters.items():
            drafters[name] = drafters.get(name, DraftCosts({}, {}, {})).merged(costs)
        return CostTable(
            {**self.verify, **newer.verify}, {**self.overhead, **newer.overhead}, drafters
        )


def between(grid: Grid, at: Sequence[float]) -> float:
    """Return a grid's value at these coordinates, by straight lines along one after the other.

    Below the first point of a coordinate its value is kept, above the last the line goes on.

    >>> between({(1, 0): 2.0, (1, 10): 4.0, (2, 0): 6.0}, (1, 5)), between({(1,): 2.0}, (9,))
    (3.0, 2.0)
    """
    if not at:
        return next(iter(grid.values()))
    points: list[tuple[float, float]] = []
    for x, group in groupby(sorted(grid.items()), key=lambda entry: entry[0][0]):
        points.append((x, between({key[1:]: y for key, y in group}, at[1:])))
    return line(tuple(points), at[0])


def overlapped(draft: float, verify: float, ready: float) -> float:
    """Return the time of drafting and verifying where both may run at once.

    While the target verifies, a drafter on a device of its own goes on as if everything will be
    accepted and its next guess is the bonus. If so its next drafts are made already, for as long as
    the target took; if not they are made anew.

    Args:
        draft: time of drafting.
        verify: time of verifying.
        ready: how often the guess is right: survival at the depth behind the chain's last.

    >>> overlapped(2.0, 3.0, 0.5), overlapped(2.0, 3.0, 0.0)
    (4.0, 5.0)
    """
    return draft + verify - ready * min(draft, verify)


def fit_levels(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Return (first level, every further level) in seconds: the best line through totals by levels.

    With a single number of levels the further ones are taken to be free.

    >>> fit_levels({1: 2.0, 2: 3.0, 4: 5.0})
    (2.0, 1.0)
    """
    levels = [level - 1 for level in seconds]
    mean_x, mean_y = fmean(levels), fmean(seconds.values())
    spread = sum((x - mean_x) ** 2 for x in levels)
    if not spread:
        return mean_y, 0.0
    pairs = zip(levels, seconds.values(), strict=True)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread
    return mean_y - slope * mean_x, slope

"""Stats: what rounds say about a drafter. Pure functions; docs/metrics.md defines every figure.

Counts are micro averages: sums over all rounds of all prompts, divided once. The prefill and the
token it emits are no round. Intervals come from resampling prompts; nothing is timed here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import scipy.stats  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray

NGRAM = 4  # an output loops where it repeats this many tokens
CONFIDENCE = 0.95
_RESAMPLES = 9999


@dataclass(frozen=True)
class Round:
    """One round of one prompt, after the cut at a stop or limit.

    Args:
        accepted: drafted tokens that were emitted.
        attempted: depths that were judged; a depth is if the node above it was accepted.
        drafted: nodes that were drafted.
        emitted: tokens that were emitted, the bonus or correction included.
        seconds: its share of the engine's time.
        looped: whether one of its tokens lies in a repeated 4-gram of the output.
        position: context index of its root.
    """

    accepted: int
    attempted: int
    drafted: int
    emitted: int
    seconds: float = 0.0
    looped: bool = False
    position: int = 0


@dataclass(frozen=True)
class Acceptance:
    """What a set of rounds says about acceptance.

    Args:
        rounds: their number.
        tokens: emitted in them.
        accepted: drafted tokens among these.
        attempted: depths judged.
        drafted: nodes drafted.
        undrafted: rounds whose tree was the root alone.
        alpha_by_depth: of the rounds that judged depth d (from 1), the share that accepted it.
        survival_by_depth: of all rounds, the share that accepted depth d (from 1).
    """

    rounds: int
    tokens: int
    accepted: int
    attempted: int
    drafted: int
    undrafted: int
    alpha_by_depth: tuple[float, ...]
    survival_by_depth: tuple[float, ...]

    @property
    def tau(self) -> float | None:
        """Return emitted tokens a round, bonus included; None without rounds."""
        return _share(self.tokens, self.rounds)

    @property
    def alpha(self) -> float | None:
        """Return accepted over attempted depths; None if nothing was attempted."""
        return _share(self.accepted, self.attempted)

    @property
    def accepted_per_round(self) -> float | None:
        """Return accepted drafts a round, bonus not included; None without rounds."""
        return _share(self.accepted, self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Return accepted over drafted nodes, as serving engines report it; depends on gamma."""
        return _share(self.accepted, self.drafted)


def acceptance(rounds: Sequence[Round]) -> Acceptance:
    """Count rounds.

    >>> found = acceptance([Round(2, 3, 4, 3), Round(0, 1, 4, 1)])
    >>> found.tau, found.alpha, found.survival_by_depth
    (2.0, 0.5, (0.5, 0.5, 0.0))
    """
    deepest = max((r.attempted for r in rounds), default=0)
    depths = range(1, deepest + 1)
    reached = [sum(r.accepted >= depth for r in rounds) for depth in depths]
    judged = [sum(r.attempted >= depth for r in rounds) for depth in depths]
    return Acceptance(
        rounds=len(rounds),
        tokens=sum(r.emitted for r in rounds),
        accepted=sum(r.accepted for r in rounds),
        attempted=sum(r.attempted for r in rounds),
        drafted=sum(r.drafted for r in rounds),
        undrafted=sum(r.drafted == 0 for r in rounds),
        alpha_by_depth=tuple(a / b for a, b in zip(reached, judged, strict=True)),
        survival_by_depth=tuple(a / len(rounds) for a in reached),
    )


def looped(ids: Sequence[int], n: int = NGRAM) -> list[bool]:
    """Mark the tokens that lie in an n-gram which occurred earlier in the same output.

    The two occurrences may overlap. The first occurrence itself is not marked.

    >>> looped([1, 2, 3, 1, 2, 3], n=3)
    [False, False, False, True, True, True]
    """
    marks = [False] * len(ids)
    seen: set[tuple[int, ...]] = set()
    for start in range(len(ids) - n + 1):
        gram = tuple(ids[start : start + n])
        if gram in seen:
            marks[start : start + n] = [True] * n
        seen.add(gram)
    return marks


def distinct(outputs: Sequence[Sequence[int]], n: int = NGRAM) -> float | None:
    """Return the share of n-grams that are the first of their kind in their own output.

    Li et al. 2016's distinct-n, counted within outputs and added up over them; None without any.

    >>> distinct([[1, 2, 1, 2, 1]], n=2)
    0.5
    """
    grams = [[tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)] for ids in outputs]
    return _share(sum(len(set(one)) for one in grams), sum(map(len, grams)))


@dataclass(frozen=True)
class Work:
    """What one prompt (or one batch of prompts) took, all repeats together.

    Args:
        amount: what was produced, such as tokens.
        cost: what it took, such as seconds or rounds.
    """

    amount: float
    cost: float


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% interval; no interval where fewer than two prompts were measured."""

    value: float | None
    interval: tuple[float, float] | None


def rate(work: Sequence[Work]) -> Estimate:
    """Return sum(amount) / sum(cost) over prompts: tau, tokens a second."""
    table = np.array([(w.amount, w.cost) for w in work], dtype=np.float64).reshape(-1, 2)
    return _estimate(table)


def speedup(drafter: Sequence[Work], baseline: Sequence[Work]) -> Estimate:
    """Return the ratio of two rates on the same prompts, in the same order.

    Prompts are resampled in pairs, so what makes a prompt slow for both does not widen the
    interval. A ratio of sums is never a mean of ratios.

    Raises:
        ValueError: if the two differ in length.
    """
    if len(drafter) != len(baseline):
        raise ValueError(f"{len(drafter)} prompts against {len(baseline)}: give the same prompts")
    pairs = zip(drafter, baseline, strict=True)
    rows = [(d.amount, d.cost, b.amount, b.cost) for d, b in pairs]
    return _estimate(np.array(rows, dtype=np.float64).reshape(-1, 4))


def change(new: Sequence[tuple[Work, Work]], old: Sequence[tuple[Work, Work]]) -> Estimate:
    """Return new over old speed-up on the same prompts, each against its own plain decoding.

    Args:
        new: a drafter's and plain decoding's work on each prompt.
        old: the same of an earlier run, in the same order.

    Raises:
        ValueError: if the two differ in length.
    """
    if len(new) != len(old):
        raise ValueError(f"{len(new)} prompts against {len(old)}: give the same prompts")
    parts = [(*a, *b) for a, b in zip(new, old, strict=True)]
    rows = [[value for w in part for value in (w.amount, w.cost)] for part in parts]
    return _estimate(np.array(rows, dtype=np.float64).reshape(-1, 8))


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Return median(above) / median(below) with its interval, the two resampled apart.

    A slow spell of the machine moves a mean; it widens this interval.
    """
    if not above or not below:
        return Estimate(None, None)
    samples = np.array(above, dtype=np.float64), np.array(below, dtype=np.float64)
    value = float(_medians(samples[0], samples[1]))
    if min(len(above), len(below)) < 2:
        return Estimate(value, None)
    return Estimate(value, _bootstrap(samples, _medians, paired=False, resamples=999))


def _medians(
    above: NDArray[np.float64], below: NDArray[np.float64], axis: int = -1
) -> NDArray[np.float64]:
    return np.median(above, axis) / np.median(below, axis)


def _estimate(table: NDArray[np.float64]) -> Estimate:
    """Return the ratio of the sums over prompts with its interval; table [prompts, 2, 4 or 8]."""
    table = table[(table > 0).all(1)]  # a prompt that ended at its prefill says nothing
    if not len(table):
        return Estimate(None, None)
    value = float(_ratio(*table.T))
    if len(table) < 2:
        return Estimate(value, None)
    return Estimate(value, _bootstrap(tuple(table.T), _ratio, paired=True, resamples=_RESAMPLES))


def _bootstrap(
    samples: tuple[NDArray[np.float64], ...],
    statistic: Callable[..., NDArray[np.float64]],
    *,
    paired: bool,
    resamples: int,
) -> tuple[float, float]:
    found = cast("Any", scipy.stats).bootstrap(
        samples,
        statistic,
        paired=paired,
        vectorized=True,
        n_resamples=resamples,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    interval = found.confidence_interval
    return float(interval.low), float(interval.high)


def _ratio(*columns: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    rates = [a.sum(axis) / b.sum(axis) for a, b in zip(columns[::2], columns[1::2], strict=True)]
    while len(rates) > 1:  # a ratio of rates, or of two such ratios
        rates = [a / b for a, b in zip(rates[::2], rates[1::2], strict=True)]
    return rates[0]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None

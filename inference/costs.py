"""Costs: what a forward over n tokens takes, and what follows for a drafter's speed.

T(n) is the target's forward over n new tokens a row, over a cached prefix. The sizes are timed in
turns, so that a slow spell of the machine hits all of them, and the medians are kept.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np
import torch

from drafters.base import Features
from drafters.target import Target
from drafters.tree import TokenTree

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


@dataclass(frozen=True)
class Costs:
    """T(n) of one or many rows.

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


class CostMeter:
    """Times forwards of a target.

    Args:
        target: whose forward is timed.
        prefix: [m] ids that every row has cached.
        rows: batch size.
        sizes: the values of n; 1 is always among them.
    """

    @torch.inference_mode()
    def __init__(
        self, target: Target, prefix: Sequence[int], *, rows: int = 1, sizes: Sequence[int] = SIZES
    ) -> None:
        """Cache the prefix and warm every size up."""
        self.target, self.rows = target, rows
        self.sizes = sorted({1, *sizes})
        self.cache = target.new_cache(rows, len(prefix) + self.sizes[-1])
        target.prefill([torch.tensor(prefix)] * rows, self.cache, Features())
        self.times: dict[int, list[float]] = {n: [] for n in self.sizes}
        self.sample()
        for times in self.times.values():
            times.clear()

    @torch.inference_mode()
    def sample(self) -> None:
        """Time every size once."""
        for n in self.sizes:
            trees: list[TokenTree | None] = [TokenTree.chain([0] * n)] * self.rows
            layout = self.target.lay_out(trees, self.cache)
            start = synchronised(self.target)
            self.target.run(layout, self.cache, Features())
            self.times[n].append(synchronised(self.target) - start)

    @property
    def costs(self) -> Costs:
        """Return what was timed so far."""
        return Costs({n: list(times) for n, times in self.times.items()})


def synchronised(target: Target) -> float:
    """Return the time in seconds once the device has done what it was given."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


@dataclass(frozen=True)
class RoundCost:
    """Mean seconds of one round, by phase; verify is T at the mean of the trees' sizes."""

    draft: float
    build: float
    verify: float
    commit: float

    @property
    def total(self) -> float:
        """Return the seconds of a round."""
        return self.draft + self.build + self.verify + self.commit


def predicted_speedup(tau: float, cost: RoundCost, step: float) -> float:
    """Return tau * T(1) / T_round: what a drafter should bring against plain decoding.

    >>> predicted_speedup(2.0, RoundCost(0.2, 0.0, 1.1, 0.1), 1.0)
    1.4285714285714286
    """
    return tau * step / cost.total


def break_even_tau(round_seconds: float, step_seconds: float) -> float:
    """Return the tau from which on a shape pays: its round in plain rounds."""
    return round_seconds / step_seconds


def cost_ratio(draft_seconds: float, depth: int, step_seconds: float) -> float:
    """Return c: one depth's drafting as a share of a plain forward."""
    return draft_seconds / depth / step_seconds

"""Meter: times a target's forwards over n tokens.

The sizes are timed in turns, so that a slow spell of the machine hits all of them.
"""

import time
from collections.abc import Sequence

import torch

from drafters.base import Features
from drafters.target import Target
from drafters.tree import TokenTree
from inference.costs import Costs

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


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

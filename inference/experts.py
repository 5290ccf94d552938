"""Experts: how many of a mixture's experts a forward over n tokens reads.

The weights of an expert are read once for all tokens that are routed to it, so T(n) of a mixture
grows with the distinct experts hit where T(n) of a dense target is flat.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from torch import nn

from drafters.target import Target
from inference.meter import CostMeter


def expected_experts(n: int, experts: int, chosen: int) -> float:
    """Return the distinct experts that n tokens hit in a layer if routing is even, independent.

    >>> expected_experts(1, 8, 2), expected_experts(2, 8, 2)
    (2.0, 3.5)
    """
    return experts * (1 - (1 - chosen / experts) ** n)


def routers(target: Target) -> list[nn.Module]:
    """Return the modules that choose experts; none in a dense target."""
    return [m for m in target.model.modules() if type(m).__name__.endswith("TopKRouter")]


def experts_hit(meter: CostMeter) -> dict[int, float]:
    """Return the distinct experts that the forwards of a meter hit, the mean over layers, by n."""
    found: dict[int, float] = {}
    for n in meter.sizes:
        with _watched(routers(meter.target)) as counts:
            meter.run(n)
        if counts:
            found[n] = fmean(counts)
    return found


@contextmanager
def _watched(modules: list[nn.Module]) -> Iterator[list[int]]:
    """Collect how many distinct experts each router chooses while the block runs."""
    counts: list[int] = []

    def note(_: nn.Module, __: Any, output: Any) -> None:
        counts.append(len(output[-1].unique()))  # the last output: [tokens, chosen] indices

    hooks = [module.register_forward_hook(note) for module in modules]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()

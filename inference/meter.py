"""Meter: times a target's forwards over n tokens, and a drafter's rounds in several shapes.

Whatever is compared is timed in turns, so that a slow spell of the machine hits all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from drafters.base import Drafter, Features
from drafters.checkpoint import load_drafter
from drafters.growth import Chain, Growth
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from drafters.tree import TokenTree
from inference.clock import now
from inference.costs import Costs, CostTable, DraftCosts, Load, fit_levels
from inference.engine import Decoder, Request
from inference.stop import Stop

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
WIDE_SIZES = (*SIZES, 24, 32, 48, 64)


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
        # different tokens, as in text: a mixture of experts reads more weights for each
        repeats = -(-self.sizes[-1] // len(prefix))
        self.tokens = (list(prefix) * repeats)[: self.sizes[-1]]
        self.cache = target.new_cache(rows, len(prefix) + self.sizes[-1])
        target.prefill([torch.tensor(prefix)] * rows, self.cache, Features())
        self.times: dict[int, list[float]] = {n: [] for n in self.sizes}
        self.sample()
        for times in self.times.values():
            times.clear()

    def sample(self) -> None:
        """Time every size once, after one forward untimed: what ran before left caches cold."""
        self.run(1)
        for n in self.sizes:
            self.times[n].append(self.run(n))

    @torch.inference_mode()
    def run(self, n: int) -> float:
        """Run n tokens a row over the cached prefix; return the seconds."""
        trees: list[TokenTree | None] = [TokenTree.chain(self.tokens[:n])] * self.rows
        layout = self.target.lay_out(trees, self.cache)
        start = now(self.target.device)
        self.target.run(layout, self.cache, Features())
        return now(self.target.device) - start

    @property
    def costs(self) -> Costs:
        """Return what was timed so far."""
        return Costs({n: list(times) for n, times in self.times.items()})


@dataclass(frozen=True)
class Probe:
    """A shape whose rounds are timed.

    Args:
        key: what its costs are filed under; probes of one key differ in levels or width.
        drafter: proposes.
        growth: its levels are the growth's depth.
        width: nodes expanded a level.
    """

    key: str
    drafter: Drafter
    growth: Growth
    width: int = 1


class RoundMeter:
    """Times rounds of one shape; outputs grow from the prefix on and never end.

    Args:
        target: decides.
        drafter: proposes.
        growth: the shape.
        prefix: [m] ids that every row starts with.
        rows: batch size.
        samples: how often `sample` will be called at most.
        warp: how logits become laws.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        growth: Growth,
        prefix: Sequence[int],
        rows: int,
        samples: int,
        warp: Warp,
    ) -> None:
        """Prefill and run a round for warmth."""
        room = (samples + 2) * (growth.depth + 1)
        self.decoder = Decoder(
            target,
            drafter,
            growth,
            rows=rows,
            capacity=len(prefix) + room,
            warp=warp,
            stop=Stop(),
        )
        self.decoder.admit({row: Request(prefix, room, RowRandom(0, row)) for row in range(rows)})
        self.decoder.round()
        self.draft: list[float] = []
        self.overhead: list[float] = []

    def sample(self) -> None:
        """Time one round."""
        before = replace(self.decoder.clock)
        self.decoder.round()
        clock = self.decoder.clock
        self.draft.append(clock.draft - before.draft)
        self.overhead.append(clock.build - before.build + clock.commit - before.commit)


def measure_costs(
    target: Target,
    probes: Sequence[Probe],
    prefix: Sequence[int],
    rows: int = 1,
    *,
    warp: Warp,
    samples: int = 10,
    sizes: Sequence[int] = SIZES,
) -> CostTable:
    """Measure T(n) and the rounds of some shapes, in turns; medians.

    Args:
        target: decides.
        probes: the shapes; none: T(n) and the plain round alone.
        prefix: [m] ids that every row has cached; m is the context.
        rows: batch size.
        warp: how logits become laws.
        samples: how often everything is timed.
        sizes: the n of T(n).
    """
    load = Load(rows, len(prefix))
    meter = CostMeter(target, prefix, rows=rows, sizes=sizes)
    bare = Probe("", load_drafter("none", target), Chain(1))
    rounds = [
        RoundMeter(target, probe.drafter, probe.growth, prefix, rows, samples, warp)
        for probe in (bare, *probes)
    ]
    for _ in range(samples):
        meter.sample()
        for one in rounds:
            one.sample()
    verify = {(load.rows, load.context, n): s for n, s in meter.costs.seconds.items()}
    table = CostTable(verify, {(load.rows, load.context): median(rounds[0].overhead)})
    for key in dict.fromkeys(probe.key for probe in probes):
        pairs = zip(probes, rounds[1:], strict=True)
        own = [(probe, one) for probe, one in pairs if probe.key == key]
        table = table.merged(CostTable({}, {}, {key: _draft_costs(own, load)}))
    return table


def _draft_costs(own: Sequence[tuple[Probe, RoundMeter]], load: Load) -> DraftCosts:
    costs = DraftCosts({}, {}, {})
    for width in sorted({probe.width for probe, _ in own}):
        here = [(probe, one) for probe, one in own if probe.width == width]
        first, level = fit_levels({probe.growth.depth: median(one.draft) for probe, one in here})
        overhead = median([seconds for _, one in here for seconds in one.overhead])
        where = (width, load.rows, load.context)
        newer = DraftCosts({where: first}, {where: level}, {where: overhead})
        costs = costs.merged(newer)
    return costs

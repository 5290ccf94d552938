"""Pricing: gives a growth that decides by costs the costs of this machine, measured once."""

from dataclasses import replace
from random import Random

from drafters.base import Drafter, JointDrafter
from drafters.growth import CostAware, Growth, Prices
from drafters.sampling import Warp
from drafters.target import Target
from inference.cost_store import CostStore, cost_key
from inference.costs import CostTable, Load
from inference.meter import WIDE_SIZES, Probe, measure_costs

_SAMPLES = 7


def priced(
    growth: Growth,
    target: Target,
    drafter: Drafter,
    load: Load,
    warp: Warp,
    newer: CostTable | None = None,
) -> Growth:
    """Return the growth with the prices that it needs; one that needs none as it is.

    Costs are read from the store, or measured (a few seconds) and kept there. A joint drafter's
    members have prices of their own, so that each can rest while the others draft.

    Args:
        growth: from a spec.
        target: decides.
        drafter: proposes.
        load: rows and the context that is typical.
        warp: how logits become laws.
        newer: what was measured since the store was written; it counts more, and is not kept here.
    """
    if not isinstance(growth, CostAware):
        return growth
    members = drafter.members if isinstance(drafter, JointDrafter) else ()
    newer = newer or CostTable({}, {})
    own, *others = [_prices(growth, target, one, load, warp, newer) for one in (drafter, *members)]
    return growth.priced(own, others)


def _prices(
    growth: CostAware,
    target: Target,
    drafter: Drafter,
    load: Load,
    warp: Warp,
    newer: CostTable,
) -> Prices:
    key, store = cost_key(drafter, growth, warp), CostStore(target, warp)
    table = store.load()
    if table is None or not table.covers(key, growth.expanded, load.rows):
        table = store.add(_measured(growth, target, drafter, key, load, warp))
    return table.merged(newer).prices(key, growth.expanded, load)


def _measured(
    growth: CostAware,
    target: Target,
    drafter: Drafter,
    key: str,
    load: Load,
    warp: Warp,
) -> CostTable:
    """Time the growth's own rounds."""
    room = (_SAMPLES + 3) * (growth.depth + 1) + growth.nodes + max(WIDE_SIZES)
    context = max(1, min(load.context, target.shape.max_positions - room))
    prefix = Random(0).choices(range(target.shape.vocab_size), k=context)
    return measure_costs(
        target,
        free_probes(growth, drafter, key),
        prefix,
        load.rows,
        warp=warp,
        samples=_SAMPLES,
        sizes=WIDE_SIZES,
    )


def free_probes(growth: CostAware, drafter: Drafter, key: str) -> list[Probe]:
    """Return probes of a cost-aware growth: all that it may draft is drafted, since it is free."""
    free = Prices(((1, 1.0),))
    shapes = [replace(growth, depth=depth) for depth in sorted({1, growth.depth})]
    return [Probe(key, drafter, shape.priced(free), growth.expanded) for shape in shapes]

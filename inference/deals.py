"""Deals: acceptance and costs of drafters that were measured, as inference/payoff.py weighs them.

Read from benchmark.json: survival by depth of a drafter's longest chain, and the costs of that run,
or those that this machine keeps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from drafters.errors import UserError
from drafters.growth.prices import Prices
from drafters.sampling import Warp
from drafters.target import Target
from inference.conversions import conditional
from inference.cost_store import CostStore, cost_key
from inference.costs import CostTable, DraftCosts, Load, fit_levels
from inference.payoff import Payoff
from inference.spec import Spec

_HERE = "measured"  # key of a drafter's costs in the table of one benchmark


@dataclass(frozen=True)
class Deal:
    """A measured drafter.

    Args:
        name: its spec without the shape.
        payoff: of its chains.
        costs: where they are from, for a reader.
    """

    name: str
    payoff: Payoff
    costs: str


def deals(
    result: Mapping[str, Any],
    wanted: str | None = None,
    target: Target | None = None,
    *,
    overlap: bool = False,
) -> list[Deal]:
    """Return every drafter of a benchmark that ran as a chain.

    Args:
        result: benchmark.json, as inference.report.read gives it.
        wanted: only drafters of this method, folder or spec; None: all.
        target: read the costs that this machine keeps of it; None: those of the benchmark.
        overlap: whether the drafter is to have a device of its own.

    Raises:
        UserError: if no such drafter ran as a chain, or its costs are not kept here.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in result["drafters"]:
        if one["growth"] != "chain" or not one["rounds"]:
            continue
        name = _bare(one["name"])
        if wanted in (None, one["method"], one["checkpoint"], one["name"], name):
            groups.setdefault(name, []).append(one)
    if not groups:
        ran = ", ".join(one["name"] for one in result["drafters"]) or "none"
        raise UserError(
            f"no {wanted or 'drafter'} ran as a chain: benchmark one with growth=chain, as deep as "
            f"pays at most; in this file: {ran}"
        )
    return [_deal(result, name, chains, target, overlap) for name, chains in groups.items()]


def _deal(
    result: Mapping[str, Any],
    name: str,
    chains: Sequence[Mapping[str, Any]],
    target: Target | None,
    overlap: bool,
) -> Deal:
    longest = max(chains, key=lambda one: one["depth"])
    settings = result["settings"]
    load = Load(settings["rows"], settings["context"])
    if target is None:
        prices = _table(result, chains, load).prices(_HERE, 1, load)
        depths = sorted({one["depth"] for one in chains})
        costs = f"this benchmark's, chains of {', '.join(map(str, depths))}"
        if len(depths) == 1:
            costs += "; every depth is taken to cost the same"
    else:
        prices = _kept(target, longest, settings, load)
        costs = "those that this machine keeps"
    alpha = tuple(conditional(longest["survival_by_depth"]))
    return Deal(name, Payoff(alpha, prices, overlap), costs)


def _table(result: Mapping[str, Any], chains: Sequence[Mapping[str, Any]], load: Load) -> CostTable:
    """Return the costs of one benchmark in the form of those that are kept."""
    where = load.rows, load.context
    plain = _phase(result["baseline"], "build", "commit")
    drafting = {one["depth"]: _phase(one, "draft") for one in chains}
    first, level = fit_levels(drafting)
    if len(drafting) == 1:
        first = level = first / next(iter(drafting))
    overhead = fmean(_phase(one, "build", "commit") for one in chains)
    at = (1, *where)
    return CostTable(
        {(*where, int(n)): seconds for n, seconds in result["verify_seconds"].items()},
        {where: plain},
        {_HERE: DraftCosts({at: first}, {at: level}, {at: overhead})},
    )


def _phase(one: Mapping[str, Any], *names: str) -> float:
    """Return the seconds that a round spends in these phases."""
    return one["round_seconds"] * sum(one["time_share"][name] for name in names)


def _kept(
    target: Target, one: Mapping[str, Any], settings: Mapping[str, Any], load: Load
) -> Prices:
    warp = Warp(*(settings[name] for name in ("temperature", "top_k", "top_p", "min_p")))
    spec = Spec.parse(one["name"])
    key = cost_key(spec.load(target), spec.growth, warp)
    table = CostStore(target, warp).load()
    if table is None or not table.covers(key, 1, load.rows):
        raise UserError(
            f"no costs of {one['name']} at {load.rows} rows are kept on this machine: run "
            "scripts/tune.py for it first, or leave --target out"
        )
    return table.prices(key, 1, load)


def _bare(spec: str) -> str:
    """Return a spec without its shape."""
    parsed = Spec.parse(spec)
    options = ",".join(f"{key}={value}" for key, value in parsed.options.items())
    return f"{parsed.drafter}:{options}" if options else parsed.drafter

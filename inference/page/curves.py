"""Curves: what a benchmark's own costs and acceptance predict for other budgets, and the ceiling.

A chain's prediction takes survival by depth of the longest measured chain of the same drafter
(rounds that drafted less, or nothing, are in it), its cost of drafting a depth, T(n) and the
engine's overhead as measured. The oracle drafts perfectly and for nothing: n + 1 tokens for
T(n + 1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inference.forecast import RoundCost, predicted_speedup


@dataclass(frozen=True)
class Point:
    """One measured shape: its budget in drafted nodes, and what it brought."""

    nodes: int
    tau: float
    speedup: float
    tau_interval: Sequence[float] | None
    speedup_interval: Sequence[float] | None
    chain: bool


@dataclass(frozen=True)
class Line:
    """All shapes of one drafter.

    Args:
        name: of the drafter.
        points: measured, by budget.
        predicted: (gamma, tau, speed-up) of chains; empty if no chain was measured.
    """

    name: str
    points: Sequence[Point]
    predicted: Sequence[tuple[int, float, float]]


def verify_cost(result: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Return T(n) / T(1) by n ascending."""
    return sorted((int(n), float(value)) for n, value in result["verify_cost"].items())


def oracle(result: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Return (drafted nodes, speed-up) of perfect drafts that cost nothing.

    >>> oracle({"verify_cost": {"1": 1.0, "3": 1.5}})
    [(0, 1.0), (2, 2.0)]
    """
    return [(n - 1, n / cost) for n, cost in verify_cost(result)]


def lines(result: Mapping[str, Any], names: Sequence[str]) -> list[Line]:
    """Return a line for every drafter with weights, or without, that proposed anything.

    Args:
        result: benchmark.json.
        names: of the drafter of each of its entries; equal names share a line.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for name, one in zip(names, result["drafters"], strict=True):
        if one["speedup"] is not None and one["tau"] is not None:
            found.setdefault(name, []).append(one)
    return [_line(name, shapes, result) for name, shapes in found.items()]


def _line(name: str, shapes: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> Line:
    points = [
        Point(
            one["nodes"],
            one["tau"],
            one["speedup"],
            one["tau_interval"],
            one["speedup_interval"],
            one["growth"] == "chain",
        )
        for one in shapes
        if one["growth"] != "cost_aware"  # its budget is another one every round
    ]
    chains = [one for one in shapes if one["growth"] == "chain" and one["cost_ratio"] is not None]
    longest = max(chains, key=lambda one: one["nodes"], default=None)
    predicted = [] if longest is None else _predicted(longest, result)
    return Line(name, sorted(points, key=lambda p: p.nodes), predicted)


def _predicted(one: Mapping[str, Any], result: Mapping[str, Any]) -> list[tuple[int, float, float]]:
    sizes, costs = zip(*verify_cost(result), strict=True)
    _, build, commit = _phases(one, result)
    draft, plain_build, plain_commit = _phases(result["baseline"], result)
    plain = RoundCost(draft, plain_build, 1.0, plain_commit)
    found: list[tuple[int, float, float]] = []
    tau = 1.0
    for gamma, survived in enumerate(one["survival_by_depth"], start=1):
        tau += survived
        verify = float(np.interp(gamma + 1, sizes, costs))
        cost = RoundCost(one["cost_ratio"] * gamma, build, verify, commit)
        found.append((gamma, tau, predicted_speedup(tau, cost, plain)))
    return found


def _phases(one: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the time of drafting, building and committing in a mean round, in steps of T(1)."""
    step = result["verify_seconds"]["1"]
    draft, build, commit = (one["time_share"][phase] for phase in ("draft", "build", "commit"))
    whole = one["round_seconds"] / step
    return draft * whole, build * whole, commit * whole

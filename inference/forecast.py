"""Forecast: from acceptance and costs to speed-ups. Pure functions; docs/metrics.md defines them.

tau is 1 + the sum of survival (inference/conversions.py); a formula with one alpha for all depths
holds only where it does not depend on the depth.
"""

from dataclasses import dataclass

from inference.costs import CostTable, Load, Shape


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


def predicted_speedup(tau: float, cost: RoundCost, plain: RoundCost) -> float:
    """Return tau * T_plain / T_round: what a drafter should bring against plain decoding.

    >>> predicted_speedup(2.0, RoundCost(0.5, 0.0, 1.25, 0.25), RoundCost(0.0, 0.0, 1.0, 0.25))
    1.25
    """
    return tau * plain.total / cost.total


def break_even_tau(round_seconds: float, step_seconds: float) -> float:
    """Return the tau from which on a shape pays: its round in plain rounds."""
    return round_seconds / step_seconds


def cost_ratio(draft_seconds: float, depth: int, step_seconds: float) -> float:
    """Return c: one depth's drafting as a share of a plain forward."""
    return draft_seconds / depth / step_seconds


def forecast(
    table: CostTable, drafter: str, shape: Shape, tau: float, load: Load, ready: float = 0.0
) -> float:
    """Return the speed-up over plain decoding that acceptance and stored costs predict.

    Args:
        table: measured before.
        drafter: its key in the table.
        shape: levels, nodes and width that it drafts.
        tau: emitted tokens a round, from acceptance.
        load: rows and context.
        ready: see inference.costs.overlapped.

    Raises:
        KeyError: if the drafter was not measured.

    Source: tau * T_plain / T_round; one alpha and T(n) = T(1) give Leviathan et al. 2023, Thm 3.8.
    """
    return tau * table.plain(load) / table.round(drafter, shape, load, ready)

"""Payoffs of measured drafters: literal benchmarks in, exact prices out."""

from pathlib import Path
from typing import Any

import pytest

from drafters.errors import UserError
from drafters.growth import Chain
from drafters.growth.prices import Prices
from drafters.registry import build_drafter
from drafters.sampling import Warp
from inference.cost_store import CostStore, cost_key
from inference.costs import CostTable, DraftCosts
from inference.deals import deals
from tests.tiny import tiny_target


def measured(name: str, depth: int, draft: float, survival: list[float]) -> dict[str, Any]:
    """A round of draft + 4 + 1 seconds, the last of them build and commit."""
    whole = draft + 5.0
    share = {"draft": draft / whole, "build": 0.25 / whole, "commit": 0.75 / whole}
    return {
        "name": name,
        "method": name.partition(":")[0],
        "checkpoint": None,
        "growth": "chain",
        "depth": depth,
        "rounds": 8,
        "round_seconds": whole,
        "time_share": {**share, "verify": 4 / whole},
        "survival_by_depth": survival,
    }


def benchmark(*drafters: dict[str, Any]) -> dict[str, Any]:
    share = {"draft": 0.0, "build": 0.0, "verify": 0.8, "commit": 0.2}
    return {
        "format_version": 1,
        "settings": {
            "rows": 1,
            "context": 100,
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
        },
        "baseline": {"round_seconds": 5.0, "time_share": share},
        "verify_seconds": {"1": 4.0, "3": 4.0, "5": 9.0},
        "drafters": list(drafters),
    }


SHALLOW = measured("ngram:gamma=2", 2, 1.0, [0.5, 0.25])
DEEP = measured("ngram:gamma=4", 4, 2.0, [0.5, 0.25, 0.25, 0.0])


def test_two_depths_tell_the_first_from_the_others() -> None:
    (deal,) = deals(benchmark(SHALLOW, DEEP))
    assert (deal.name, deal.costs) == ("ngram", "this benchmark's, chains of 2, 4")
    assert deal.payoff.alpha == (0.5, 0.5, 1.0, 0.0)
    assert deal.payoff.prices == Prices(((1, 1.0), (3, 1.0), (5, 2.0)), first=0.1, level=0.1)
    assert deal.payoff.speedup(2) == pytest.approx(1.75 / 1.2)


def test_one_depth_is_spread_evenly_and_says_so() -> None:
    (deal,) = deals(benchmark(DEEP, measured("eagle", 4, 4.0, [0.5] * 4)), "ngram")
    assert deal.payoff.prices.first == deal.payoff.prices.level == 0.1
    assert deal.costs.endswith("every depth is taken to cost the same")


def test_kept_costs_are_those_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path))
    target = tiny_target(num_hidden_layers=1)
    with pytest.raises(UserError, match=r"no costs of ngram:gamma=4 at 1 rows are kept .*tune"):
        deals(benchmark(DEEP), target=target)
    key = cost_key(build_drafter("ngram", {}, target.shape), Chain(4), Warp())
    at = {(1, 1, 100): 0.5}
    costs = {key: DraftCosts(at, at, {(1, 1, 100): 0.0})}
    table = CostTable({(1, 100, 1): 1.0, (1, 100, 5): 2.0}, {(1, 100): 0.0}, costs)
    CostStore(target, Warp()).add(table)
    (deal,) = deals(benchmark(DEEP), target=target)
    assert deal.payoff.prices == Prices(((1, 1.0), (5, 2.0)), first=0.5, level=0.5)


def test_what_ran_as_no_chain_is_refused() -> None:
    tree = {**DEEP, "growth": "dynamic", "name": "ngram:growth=dynamic"}
    with pytest.raises(UserError, match=r"no drafter ran as a chain: .* ngram:growth=dynamic"):
        deals(benchmark(tree))
    with pytest.raises(UserError, match="no eagle ran as a chain"):
        deals(benchmark(DEEP), "eagle")

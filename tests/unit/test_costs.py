"""Costs and forecasts: scripted costs and acceptance give exact figures."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from drafters.errors import UserError
from drafters.growth import Chain, CostAware, Dynamic, Prices
from drafters.registry import build_drafter
from drafters.sampling import Warp
from inference.conversions import chain_tau, survival
from inference.cost_store import CostStore, cost_key
from inference.costs import CostTable, DraftCosts, Load, Shape, between, fit_levels
from inference.forecast import forecast
from tests.tiny import tiny_target

# seconds in eighths, so that every figure is exact: T(1) = 4, T(5) = 4, T(9) = 6; half for the rest
TABLE = CostTable(
    verify={
        **{(1, 100, n): s for n, s in ((1, 4.0), (5, 4.0), (9, 6.0))},
        **{(1, 300, n): s for n, s in ((1, 6.0), (5, 6.0), (9, 8.0))},
        **{(4, 100, n): s for n, s in ((1, 8.0), (5, 16.0), (9, 24.0))},
    },
    overhead={(1, 100): 0.5, (4, 100): 1.0},
    drafters={
        "d": DraftCosts(
            first={(1, 1, 100): 1.0, (3, 1, 100): 1.5},
            level={(1, 1, 100): 0.25, (3, 1, 100): 0.5},
            overhead={(1, 1, 100): 0.75, (3, 1, 100): 0.75},
        )
    },
)


def test_a_grid_is_linear_between_its_points_and_goes_on_behind_them() -> None:
    one = Load(1, 100)
    assert [TABLE.forward(n, one) for n in (1, 3, 5, 7, 9, 13)] == [4, 4, 4, 5, 6, 8]
    assert [TABLE.forward(1, Load(1, c)) for c in (0, 100, 200, 500)] == [4, 4, 5, 8]
    # at 4 rows a single context was measured: it stands for all
    assert [TABLE.forward(5, Load(r, 100)) for r in (1, 2, 4, 5)] == [4, 8, 16, 20]
    assert TABLE.forward(1, Load(4, 900)) == 8
    assert between({(2,): 3.0, (4,): 1.0}, (6,)) == -1


def test_a_round_adds_up() -> None:
    load = Load(1, 100)
    assert TABLE.plain(load) == 4.5
    assert TABLE.round("d", Shape(), load) == 4.5
    assert TABLE.round("d", Shape(levels=1, nodes=1), load) == 1 + 4 + 0.75
    assert TABLE.round("d", Shape(levels=3, nodes=6, width=3), load) == 1.5 + 2 * 0.5 + 5 + 0.75
    assert TABLE.round("d", Shape(levels=3, nodes=6, width=2), load) == 1.25 + 2 * 0.375 + 5 + 0.75
    with pytest.raises(KeyError):
        TABLE.round("unknown", Shape(1, 1), load)


def test_prices_are_the_same_costs_in_plain_rounds() -> None:
    prices = TABLE.prices("d", 1, Load(1, 100))
    assert prices == Prices(
        ((1, 1.0), (5, 1.0), (9, 6.5 / 4.5)), first=1.25 / 4.5, level=0.25 / 4.5
    )
    shape = Shape(levels=3, nodes=6)
    total = prices.tokens(7) + prices.drafting(3)
    assert total * 4.5 == pytest.approx(TABLE.round("d", shape, Load(1, 100)), abs=1e-12)


def test_what_was_measured_covers_what_lies_within() -> None:
    for width, covered in ((1, True), (2, True), (3, True), (4, False)):
        assert TABLE.covers("d", width, 1) is covered
    assert not TABLE.covers("d", 1, 2)  # T(n) was timed up to 4 rows, this drafter at one
    assert not TABLE.covers("e", 1, 1)


def test_prices_never_fall_and_start_at_one_token() -> None:
    assert Prices(((1, 1.0), (2, 0.9), (4, 1.2))).verify == ((1, 1.0), (2, 1.0), (4, 1.2))
    assert [Prices(((1, 1.0),), 0.5, 0.25).drafting(n) for n in (0, 1, 3)] == [0, 0.5, 1]
    for sizes in ((), ((2, 1.0),), ((1, 1.0), (1, 2.0))):
        with pytest.raises(UserError, match="sizes ascending from 1"):
            Prices(sizes)


def test_levels_are_a_line() -> None:
    assert fit_levels({1: 2.0, 2: 3.0, 4: 5.0}) == (2, 1)
    assert fit_levels({4: 5.0}) == (5, 0)


def test_tau_of_a_chain() -> None:
    """Exact values: with one alpha it is a geometric sum, else the sum of products."""
    assert survival([0.75, 0.5, 0.5]) == [0.75, 0.375, 0.1875]
    assert chain_tau([0.75, 0.5, 0.5], 2) == 2.125
    assert chain_tau([0.75, 0.5, 0.5], 9) == 2.3125
    for gamma, value in ((1, 1.8), (2, 2.44), (3, 2.952), (4, 3.3616), (7, 4.16113920)):
        assert chain_tau([0.8] * gamma, gamma) == pytest.approx(value, abs=1e-9)
        exact = sum(Fraction(4, 5) ** d for d in range(gamma + 1))
        assert chain_tau([0.8] * gamma, gamma) == pytest.approx(float(exact), abs=1e-12)


@pytest.mark.parametrize(
    ("alpha", "c", "gamma", "value"),
    [(0.5, 0.05, 3, 1.63), (0.7, 0.1, 4, 1.98), (0.8, 0.2, 4, 1.87), (0.9, 0.3, 5, 1.87)],
)
def test_forecasts_agree_with_the_formula(alpha: float, c: float, gamma: int, value: float) -> None:
    """Leviathan et al.: E[tokens] / (gamma c + 1), the best gamma of a published table."""
    costs = DraftCosts({(1, 1, 0): c}, {(1, 1, 0): c}, {(1, 1, 0): 0.0})
    table = CostTable({(1, 0, 1): 1.0}, {(1, 0): 0.0}, {"d": costs})

    def speedup(gamma: int) -> float:
        tau = chain_tau([alpha] * gamma, gamma)
        return forecast(table, "d", Shape(gamma, gamma), tau, Load(1, 0))

    assert round(speedup(gamma), 2) == value
    assert max(range(1, 33), key=speedup) == gamma


def test_a_forecast_is_tau_over_the_round() -> None:
    shape, load = Shape(levels=2, nodes=2), Load(1, 100)
    assert forecast(TABLE, "d", shape, 2.0, load) == 2 * 4.5 / (1 + 0.25 + 4 + 0.75)


def test_costs_are_found_again_only_where_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path))
    store = CostStore(tiny_target(num_hidden_layers=1), Warp())
    assert store.load() is None
    assert store.add(TABLE) == TABLE
    assert store.load() == TABLE
    same = CostStore(tiny_target(num_hidden_layers=1), Warp())
    assert same.load() == TABLE
    others = [
        tiny_target(num_hidden_layers=1, seed=1),
        tiny_target(num_hidden_layers=1, engine="reference"),
    ]
    assert [CostStore(other, Warp()).load() for other in others] == [None, None]
    assert CostStore(tiny_target(num_hidden_layers=1), Warp(1.0)).load() is None
    with monkeypatch.context() as changed:
        changed.setattr("drafters.native.version", lambda *_: "other kernels")
        assert CostStore(tiny_target(num_hidden_layers=1), Warp()).load() is None
    for key, value in (("format_version", 0), ("identity", {})):
        stored = json.loads(store.path.read_text())
        store.path.write_text(json.dumps({**stored, key: value}))
        assert store.load() is None
        store.path.write_text(json.dumps(stored))
    store.path.write_text("{")
    assert store.load() is None


def test_new_costs_stand_beside_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path))
    store = CostStore(tiny_target(num_hidden_layers=1), Warp())
    store.add(TABLE)
    newer = CostTable(
        {(1, 100, 1): 5.0},
        {},
        {"d": DraftCosts({(1, 4, 100): 2.0}, {}, {}), "e": DraftCosts({(1, 1, 100): 3.0}, {}, {})},
    )
    table = store.add(newer)
    assert table.verify == {**TABLE.verify, (1, 100, 1): 5.0}
    assert table.drafters["d"].first == {**TABLE.drafters["d"].first, (1, 4, 100): 2.0}
    assert table.drafters["e"].first == {(1, 1, 100): 3.0}
    assert store.load() == table


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTERS_CACHE", "/proc/nothing")
    with pytest.raises(
        UserError, match=r"/proc/nothing/costs/.* cannot be written .* DRAFTERS_CACHE"
    ):
        CostStore(tiny_target(num_hidden_layers=1), Warp()).add(TABLE)


def test_costs_are_filed_by_options_draft_and_who_asks() -> None:
    shape = tiny_target(num_hidden_layers=1).shape
    plain, longer = (build_drafter("ngram", o, shape) for o in ({}, {"longest": 5}))
    medusa, chain = build_drafter("medusa", {}, shape), Chain(2)
    keys = [
        cost_key(plain, chain, Warp()),
        cost_key(longer, chain, Warp()),
        cost_key(medusa, chain, Warp()),
        cost_key(medusa, CostAware(), Warp()),
        cost_key(medusa, Chain(2, "sampled"), Warp(1.0)),
    ]
    assert len(set(keys)) == 5
    same = build_drafter("ngram", {"longest": 3, "shortest": 1}, shape)
    assert cost_key(same, Dynamic(), Warp(0.5)) == keys[0]
    assert cost_key(medusa, Chain(3, "sampled"), Warp()) == keys[2]

"""What is timed becomes a table, once; growths that decide by costs are given theirs."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drafters.growth import Chain, CostAware, CostAwareGrowth, Prices
from drafters.registry import build_drafter
from drafters.sampling import Warp
from drafters.target import Target
from inference import generate, pricing
from inference.cost_store import CostStore, cost_key
from inference.costs import CostTable, DraftCosts, Load
from inference.meter import Probe, RoundMeter, measure_costs
from inference.pricing import priced
from tests.tiny import prompts_of, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=2, hidden_size=32, intermediate_size=64)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path))
    monkeypatch.setattr(pricing, "_SAMPLES", 2)
    monkeypatch.setattr(pricing, "WIDE_SIZES", (1, 4, 8))
    return


def test_rounds_are_timed_by_phase(target: Target) -> None:
    drafter = build_drafter("ngram", {}, target.shape)
    meter = RoundMeter(target, drafter, Chain(3), [1, 2, 1, 2], 2, 3, Warp())
    for _ in range(3):
        meter.sample()
    assert len(meter.draft) == len(meter.overhead) == 3
    assert min(meter.draft + meter.overhead) > 0
    assert meter.decoder.running == [0, 1]


def test_medians_become_a_table(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted times: a level takes 2, the first 3; width 2 was timed at one depth only."""
    turns: list[str] = []

    class Forward:
        def __init__(self, *_: object, **__: object) -> None:
            self.costs = SimpleNamespace(seconds={1: 10.0, 4: 12.0})

        def sample(self) -> None:
            turns.append("T")

    class Rounds:
        def __init__(self, _: Target, drafter: object, growth: Chain, *__: object) -> None:
            self.name, self.depth = getattr(drafter, "name", ""), growth.depth
            self.draft: list[float] = []
            self.overhead: list[float] = []

        def sample(self) -> None:
            turns.append(f"{self.name}{self.depth}")
            noise = 100.0 if len(self.draft) == 1 else 0.0  # a slow spell in the second turn
            self.draft.append(1.0 + 2.0 * self.depth + noise)
            self.overhead.append({"none": 0.5, "ngram": 0.75}[self.name] + noise)

    monkeypatch.setattr("inference.meter.CostMeter", Forward)
    monkeypatch.setattr("inference.meter.RoundMeter", Rounds)
    ngram = build_drafter("ngram", {}, target.shape)
    probes = [
        Probe("a", ngram, Chain(1)),
        Probe("a", ngram, Chain(4)),
        Probe("b", ngram, Chain(2), 2),
    ]
    table = measure_costs(target, probes, [1] * 7, 2, warp=Warp(), samples=3)
    assert turns[:5] == ["T", "none1", "ngram1", "ngram4", "ngram2"]
    assert table == CostTable(
        {(2, 7, 1): 10.0, (2, 7, 4): 12.0},
        {(2, 7): 0.5},
        {
            "a": DraftCosts({(1, 2, 7): 3.0}, {(1, 2, 7): 2.0}, {(1, 2, 7): 0.75}),
            "b": DraftCosts({(2, 2, 7): 5.0}, {(2, 2, 7): 0.0}, {(2, 2, 7): 0.75}),
        },
    )


def test_a_growth_without_prices_is_left_alone(target: Target) -> None:
    drafter = build_drafter("ngram", {}, target.shape)
    growth = Chain(3)
    assert priced(growth, target, drafter, Load(1, 10), Warp()) is growth
    assert CostStore(target, Warp()).load() is None


def test_costs_are_measured_once_and_then_read(target: Target) -> None:
    drafter, growth = build_drafter("ngram", {}, target.shape), CostAware(4, 2, 3)
    first = priced(growth, target, drafter, Load(1, 10), Warp())
    assert isinstance(first, CostAwareGrowth)
    assert [n for n, _ in first.prices.verify] == [1, 4, 8]
    table = CostStore(target, Warp()).load()
    assert table is not None
    assert set(table.drafters) == {cost_key(drafter, CostAware(), Warp())}
    # what is stored decides: change it and it is read again
    key = cost_key(drafter, CostAware(), Warp())
    scripted = DraftCosts({(2, 1, 10): 7.0}, {(2, 1, 10): 1.0}, {(2, 1, 10): 0.0})
    forwards = {(1, 10, 1): 4.0, (1, 10, 4): 4.0, (1, 10, 8): 8.0}
    CostStore(target, Warp()).add(CostTable(forwards, {(1, 10): 0.0}, {key: scripted}))
    second = priced(growth, target, drafter, Load(1, 10), Warp())
    assert isinstance(second, CostAwareGrowth)
    assert second.prices == Prices(((1, 1.0), (4, 1.0), (8, 2.0)), first=7 / 4, level=1 / 4)
    # what was measured since counts more, and is not kept
    newer = CostTable({(1, 10, 4): 6.0}, {})
    third = priced(growth, target, drafter, Load(1, 10), Warp(), newer)
    assert isinstance(third, CostAwareGrowth)
    assert third.prices.verify == ((1, 1.0), (4, 1.5), (8, 2.0))
    kept = CostStore(target, Warp()).load()
    assert kept is not None
    assert kept.verify[1, 10, 4] == 4.0


def test_rows_and_widths_outside_what_was_measured_are_measured(target: Target) -> None:
    drafter = build_drafter("ngram", {}, target.shape)
    key = cost_key(drafter, CostAware(), Warp())
    for growth, rows in ((CostAware(4, 2, 2), 1), (CostAware(4, 2, 2), 3), (CostAware(4, 3, 2), 2)):
        priced(growth, target, drafter, Load(rows, 10), Warp())
    table = CostStore(target, Warp()).load()
    assert table is not None
    assert {(w, r) for w, r, _ in table.drafters[key].first} == {(2, 1), (2, 3), (3, 2)}
    before = table.verify
    priced(CostAware(4, 2, 2), target, drafter, Load(2, 10), Warp())  # between 1 and 3 rows
    after = CostStore(target, Warp()).load()
    assert after is not None
    assert after.verify == before


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_generate_prices_what_it_is_given(target: Target, temperature: float) -> None:
    torch.manual_seed(0)
    eagle = build_drafter("eagle", {"draft_vocab_size": 64, "taps": [0, 1]}, target.shape)
    assert isinstance(eagle, torch.nn.Module)
    eagle.eval()
    plain = build_drafter("none", {}, target.shape)
    prompts = prompts_of(9, 4)
    growth = CostAware(4, 1, 2, "sampled")
    outputs = generate(
        target, eagle, prompts, growth=growth, max_new_tokens=12, temperature=temperature
    )
    assert all(len(output.ids) == 12 for output in outputs)
    if not temperature:
        expected = generate(target, plain, prompts, max_new_tokens=12)
        assert [o.ids for o in outputs] == [o.ids for o in expected]
    table = CostStore(target, Warp(temperature)).load()
    assert table is not None
    assert set(table.drafters) == {cost_key(eagle, growth, Warp(temperature))}

"""The benchmark: fair turns, right counts, and figures that cannot flatter."""

import copy
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from drafters import Target
from drafters.base import Commit, Features
from drafters.errors import UserError
from drafters.growth import Chain, Growth
from drafters.registry import joined
from drafters.sampling import RowRandom, Warp
from drafters.tree import TokenTree
from inference import generate
from inference.bench import BenchSettings, Contender, Measurement, contenders, measure, steps
from inference.compare import compare, first_difference, tolerance
from inference.cost_store import CostStore, cost_key
from inference.costs import Costs, CostTable, DraftCosts
from inference.forecast import RoundCost, break_even_tau, cost_ratio, predicted_speedup
from inference.meter import CostMeter
from inference.prompts import Prompt, first_turn_ids
from inference.report import table, write
from inference.spec import Spec
from inference.stats import looped
from inference.summary import summarise
from tests.folders import VOCAB_SIZE, tiny_tokenizer
from tests.tiny import prompts_of, tiny_model, tiny_target

PROMPTS = [
    Prompt("1", "chat", ("Hi the land",)),
    Prompt("2", "code", ("x = 1",)),
    Prompt("3", "chat", ("and in the end",)),
]
QUICK = BenchSettings(max_new_tokens=13, repeats=2, warmup=1)


@pytest.fixture(scope="module", autouse=True)
def _few_cost_samples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inference.bench._COST_SAMPLES", 1)
        yield


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny_model(vocab_size=VOCAB_SIZE, num_hidden_layers=2)
    return Target(model, tiny_tokenizer(), name="tiny")


@pytest.fixture(scope="module")
def measured(target: Target) -> Measurement:
    race = contenders(target, [Spec.parse("ngram:gamma=3"), Spec.parse("none")])
    return measure(target, race, PROMPTS, QUICK)


def plain(target: Target, new: int) -> dict[tuple[int, ...], list[int]]:
    """What plain decoding answers, by prompt."""
    ids = first_turn_ids(target, PROMPTS)
    none = contenders(target, [Spec.parse("none")])[0].drafter
    outputs = generate(target, none, ids, max_new_tokens=new, rows=1)
    return {tuple(i): output.ids for i, output in zip(ids, outputs, strict=True)}


class Known:
    """Knows every answer; goes wrong after `right` tokens, and may be slow or keep a log."""

    name = "known"
    features = Features()

    def __init__(
        self,
        answers: dict[tuple[int, ...], list[int]],
        right: Callable[[tuple[int, ...]], int],
        seconds: float = 0.0,
        log: list[str] | None = None,
    ) -> None:
        self.answers, self.right, self.seconds = answers, right, seconds
        self.log = [] if log is None else log

    def options(self) -> dict[str, object]:
        return {}

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "KnownSession":
        self.log.append("start")
        return KnownSession(self, growth.depth, rows)


class KnownSession:
    features = Features()

    def __init__(self, drafter: Known, gamma: int, rows: int) -> None:
        self.drafter, self.gamma = drafter, gamma
        self.prompts: list[tuple[int, ...]] = [()] * rows
        self.done = [0] * rows
        self.roots = [0] * rows

    def observe(self, commits: Sequence[Commit | None]) -> None:
        for row, commit in enumerate(commits):
            if commit is None:
                continue
            if commit.tree is None:
                self.prompts[row], self.done[row] = tuple(commit.inputs.tolist()), 0
                self.drafter.log.append(str(len(self.prompts[row])))
            self.done[row] += len(commit.emitted)
            self.roots[row] = commit.root

    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        time.sleep(self.drafter.seconds)
        trees: list[TokenTree | None] = []
        for row, coins in enumerate(random):
            prompt, done = self.prompts[row], self.done[row]
            right = self.drafter.right(prompt)
            guess = self.drafter.answers[prompt][done : done + self.gamma]
            guess = [t if d < right else (t + 1) % VOCAB_SIZE for d, t in enumerate(guess)]
            trees.append(None if coins is None else TokenTree.chain([self.roots[row], *guess]))
        return trees


def contender(drafter: Known, gamma: int = 4, name: str = "known") -> Contender:
    growth = Chain(gamma)
    return Contender(name, drafter, growth, Spec(name, "known", growth))


def summary(target: Target, race: list[Contender], settings: BenchSettings) -> dict[str, Any]:
    return json.loads(json.dumps(summarise(measure(target, race, PROMPTS, settings), "set.jsonl")))


def test_a48_counts_are_over_all_rounds_of_all_prompts(target: Target) -> None:
    ids = [tuple(i) for i in first_turn_ids(target, PROMPTS)]
    rights = dict(zip(ids, (4, 0, 1), strict=True))
    drafter = Known(plain(target, 13), rights.__getitem__)
    one = summary(target, [contender(drafter)], QUICK)["drafters"][0]
    # 12 tokens after the prefill's: rounds of 5, 5, 2; 1 x 12; 2 x 6; twice each
    assert (one["rounds"], one["tokens"]) == (2 * (3 + 12 + 6), 2 * 36)
    assert one["tau"] == 36 / 21
    assert [one["by_category"][c]["tau"] for c in ("chat", "code")] == [24 / 9, 1.0]
    # the limit leaves the last round of each prompt fewer depths: room - 1 of them
    accepted, attempted = (4 + 4 + 1) + 0 + 6, (4 + 4 + 1) + 11 + (5 * 2 + 1)
    assert one["alpha"] == accepted / attempted
    assert one["survival_by_depth"] == [9 / 21, 2 / 21, 2 / 21, 2 / 21]
    assert one["identical"] == 3
    assert (one["near_ties"], one["different"], one["largest_gap"]) == (0, 0, None)
    assert (one["compared_tokens"], one["near_ties_per_thousand"]) == (3 * 13, 0.0)
    assert one["tau_interval"][0] < one["tau"] < one["tau_interval"][1]


def test_figures_by_context_position(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of 2 that is right up to position 12: then a round emits 1 token instead of 3."""
    ids = [tuple(i) for i in first_turn_ids(target, PROMPTS)]
    (short,) = [i for i in ids if len(i) == min(map(len, ids))]
    answers = plain(target, 13)
    start = len(short)
    monkeypatch.setattr("inference.summary.POSITIONS", (0, start + 6, start + 500))
    prompt = PROMPTS[ids.index(short)]
    drafter = Known(answers, lambda _: 2)
    measured = measure(target, [contender(drafter, gamma=2)], [prompt], QUICK)
    # roots at start + 0, 3, 6, 9: emitted 3 each
    found = summarise(measured, "x")["drafters"][0]["by_position"]
    assert list(found) == ["0", str(start + 6)]
    for part in found.values():
        assert (part["rounds"], part["tokens"], part["tau"]) == (2 * 2, 2 * 6, 3.0)
        assert part["speedup"] > 0


@pytest.mark.slow
def test_forecasts_come_from_costs_measured_before(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripted costs: T(1) = 2, T(5) = 3, a level takes 1/4, the engine 0; survival is measured."""
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path))
    drafter = Known(plain(target, 13), lambda _: 2)
    race = [contender(drafter)]
    result = summary(target, race, QUICK)
    assert result["drafters"][0]["forecast_speedup"] is None  # nothing was measured
    quarter = {(1, 1, 5): 0.25}
    costs = DraftCosts(quarter, quarter, {(1, 1, 5): 0.0})
    forwards = {(1, 5, 1): 2.0, (1, 5, 5): 3.0}
    key = cost_key(drafter, Chain(4), Warp())
    CostStore(target, Warp()).add(CostTable(forwards, {(1, 5): 0.0}, {key: costs}))
    one = summary(target, [contender(drafter)], QUICK)["drafters"][0]
    tau = 1 + sum(one["survival_by_depth"])
    drafted = one["accepted_per_round"] / one["acceptance_rate"]
    seconds = 4 * 0.25 + 2 + drafted / 4
    assert one["forecast_speedup"] == pytest.approx(tau * 2 / seconds)
    kept = CostStore(target, Warp()).load()
    assert kept is not None
    assert kept.verify != forwards  # the run's own T(n), for those that come after it
    assert kept.drafters == {key: costs}
    console = Console(width=120, record=True, file=StringIO())
    console.print(table(result | {"drafters": [one]}))
    text = console.export_text()
    assert f"{one['predicted_speedup']:.2f} {one['forecast_speedup']:.2f}" in text
    assert "\u2026" not in text  # nothing was cut


@pytest.mark.slow
def test_a49_acceptance_high_and_speedup_below_one_stand_side_by_side(target: Target) -> None:
    answers = plain(target, 13)
    slow = contender(Known(answers, lambda _: 4, seconds=0.05), name="slow")
    wrong = contender(Known(answers, lambda _: 0), name="wrong")
    settings = replace(QUICK, repeats=1)
    result = summary(target, [slow, wrong], settings)
    own, other = result["drafters"]
    assert own["alpha"] == 1.0
    assert own["tau"] == 36 / 9
    assert own["speedup"] < 1
    assert own["time_share"]["draft"] > 0.5
    assert sum(own["time_share"].values()) == pytest.approx(1)
    assert own["break_even_tau"] > own["tau"]
    assert own["cost_ratio"] * result["verify_seconds"]["1"] == pytest.approx(0.0125, rel=0.5)
    assert (other["alpha"], other["tau"]) == (0.0, 1.0)
    # equal work, prefill apart
    assert own["tokens"] == other["tokens"] == result["baseline"]["tokens"] == 36
    for one in (own, other, result["baseline"]):
        assert one["prefill_seconds"] > 0


def test_contenders_take_turns_on_every_prompt(target: Target) -> None:
    log: list[str] = []

    class Named(Known):
        def start(self, *args: Any) -> KnownSession:
            session = super().start(*args)
            self.log.append(self.name)
            return session

    answers = plain(target, 13)
    race = [contender(Known(answers, lambda _: 1, log=log), name=name) for name in "ab"]
    advanced: list[None] = []
    measure(target, race, PROMPTS, replace(QUICK, max_new_tokens=3), lambda: advanced.append(None))
    assert len(advanced) == steps(3, 2, QUICK) == 3 * (1 + 3 * 2)
    # one session each; then the warm-up; then a and b one after the other on every prompt
    lengths = [str(len(i)) for i in first_turn_ids(target, PROMPTS)]
    assert log[:2] == ["start", "start"]
    assert log[2:4] == [lengths[0]] * 2
    assert log[4:] == [length for length in lengths for _ in "ab"] * 2
    orders = [[p.group for p in one.passes] for one in race]
    assert orders == [[0, 1, 2, 0, 1, 2]] * 2


@pytest.mark.slow
def test_rows_decode_together_with_equal_outputs(target: Target) -> None:
    drafter = Known(plain(target, 13), lambda _: 2)
    settings = replace(QUICK, repeats=1)
    single = measure(target, [contender(drafter)], PROMPTS, settings)
    batched = measure(target, [contender(drafter)], PROMPTS, replace(settings, rows=2))
    assert [p.prompts for p in batched.baseline.passes[:2]] == [(0, 1), (2,)]
    for one in (single, batched):
        values = summarise(one, "x")["drafters"][0]
        assert values["identical"] == 3
        assert values["tokens"] == 36
    own = batched.drafters[0].passes[0]
    # a round's time is shared by the rows that took part in it
    shared = sum(r.seconds for output in own.outputs for r in output.rounds)
    assert shared == pytest.approx(own.clock.decode)


@pytest.mark.slow
def test_members_of_a_joint_drafter_have_accounts(target: Target) -> None:
    """What each cost and would have got alone is shown below what they did together."""
    answers = plain(target, 13)
    parts = [Known(answers, lambda _: 3), Known(answers, lambda _: 1, seconds=0.002)]
    race = [contender(joined(parts))]
    result = summarise(measure(target, race, PROMPTS, QUICK), "x")
    one = result["drafters"][0]
    assert (one["tau"], one["rounds"]) == (4.0, 18)
    right, slow = one["members"]
    assert (right["rounds"], right["accepted"], slow["accepted"]) == (18, 54, 18)
    assert right["drafted"] == slow["drafted"] == 18 * 4
    assert slow["seconds"] >= 18 * 0.002
    console = Console(file=StringIO(), width=120)
    console.print(table(result))
    text = console.file.getvalue()
    assert "known+known" in text
    assert re.search(r"known +alone +4\.00", text)
    assert re.search(r"known +alone +2\.00", text)


def test_every_key_of_the_contract_and_a_table(measured: Measurement, tmp_path: Path) -> None:
    result = summarise(measured, "set.jsonl")
    assert set(result) >= {
        "target",
        "machine",
        "versions",
        "settings",
        "baseline",
        "verify_cost",
        "drafters",
    }
    assert list(result["verify_cost"]) == ["1", "2", "3", "4", "5", "6", "7", "8", "12", "16"]
    assert result["verify_cost"]["1"] == 1.0
    one = result["drafters"][0]
    wanted = (
        "name method checkpoint parameters growth nodes draft_mode verify_mode tau alpha "
        "alpha_by_depth survival_by_depth rounds tokens seconds tokens_per_second speedup "
        "speedup_interval predicted_speedup cost_ratio time_share identical near_ties "
        "looped_share by_category"
    )
    assert set(one) >= set(wanted.split())
    assert (one["name"], one["method"], one["checkpoint"]) == ("ngram:gamma=3", "ngram", None)
    assert (one["growth"], one["shape"], one["nodes"]) == ("chain", {"gamma": 3}, 3)
    assert (one["draft_mode"], one["verify_mode"]) == ("argmax", "lossless")
    assert one["tokens_per_second"] == one["tokens"] / one["seconds"]
    plain_again = result["drafters"][1]
    assert (plain_again["tau"], plain_again["alpha"]) == (1.0, None)
    path = write(result, tmp_path / "new" / "folder")
    assert json.loads(path.read_text())["settings"]["prompts_file"] == "set.jsonl"
    assert [p.name for p in path.parent.iterdir()] == ["benchmark.json"]
    console = Console(width=120, record=True, file=StringIO())
    console.print(table(result))
    text = console.export_text()
    assert "chain 3" in text
    assert "3/3" in text


def test_what_ran_is_reported_and_a_lossy_verifier_says_so(target: Target) -> None:
    """n-grams are point masses whatever was asked for."""
    race = contenders(
        target, [Spec.parse("ngram:draft=sampled"), Spec.parse("ngram:verify=typical")]
    )
    settings = replace(QUICK, warp=Warp(temperature=1.0), max_new_tokens=8)
    result = summarise(measure(target, race, PROMPTS, settings), "x")
    sampled, lossy = result["drafters"]
    assert (sampled["draft_mode"], sampled["verify_mode"]) == ("argmax", "block")
    assert (lossy["verify_mode"], lossy["lossless"]) == ("typical (LOSSY)", False)
    console = Console(width=120, record=True, file=StringIO())
    console.print(table(result))
    assert console.export_text().count("LOSSY") == 1


def test_sampled_outputs_are_not_compared(target: Target) -> None:
    race = contenders(target, [Spec.parse("ngram")])
    settings = replace(QUICK, warp=Warp(temperature=1.0), max_new_tokens=6)
    measured = measure(target, race, PROMPTS, settings)
    assert summarise(measured, "x")["drafters"][0]["identical"] is None
    # the second repeat is drawn from other coins, and a run can be repeated
    first, second = (measured.baseline.passes[n].outputs[0].ids for n in (0, 3))
    assert first != second
    again = measure(target, contenders(target, []), PROMPTS, settings)
    assert again.baseline.passes[0].outputs[0].ids == first


def test_a_straw_man_is_called_one(measured: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = replace(measured, baseline=copy.deepcopy(measured.baseline), drafters=[])
    middle = 0.02
    for one in measured.baseline.passes:
        one.full_rounds[:] = [middle] * 50
    assert len(measured.baseline.passes) > 1
    slow = replace(measured, costs=Costs({1: [0.9 * middle] * 3}))
    assert summarise(slow, "x")["baseline"]["check"]["judged"] is False
    assert summarise(slow, "x")["failures"] == []
    monkeypatch.setattr("inference.summary.JUDGED_PARAMETERS", 0)
    result = summarise(slow, "x")
    assert result["baseline"]["check"]["share"] == pytest.approx(0.9)
    few = copy.deepcopy(slow.baseline)
    for one in few.passes:
        del one.full_rounds[10:]
    short = summarise(replace(slow, baseline=few), "x")
    assert (short["baseline"]["check"]["judged"], short["failures"]) == (False, [])
    assert "plain decoding ran at 0.90 of 1/T(1), 0.95 is the least" in result["failures"][0]
    # 0.96 is enough; so is 0.9 as long as it may be noise
    for times in ([0.96 * middle] * 3, [0.5 * middle, 0.9 * middle, 1.3 * middle]):
        fair = replace(measured, costs=Costs({1: times}))
        assert summarise(fair, "x")["failures"] == []


def test_a_wrong_output_fails_the_benchmark(measured: Measurement) -> None:
    drafter = copy.copy(measured.drafters[0])
    drafter.passes = copy.deepcopy(drafter.passes)
    ids = drafter.passes[0].outputs[0].ids
    ids[5] = (ids[5] + 1) % VOCAB_SIZE
    result = summarise(replace(measured, drafters=[drafter]), "x")
    one = result["drafters"][0]
    assert (one["identical"], one["near_ties"], one["different"]) == (2, 0, 1)
    assert one["largest_gap"] > 1e-4
    assert "1 of 3 greedy outputs differ" in result["failures"][0]


def test_near_ties_are_told_from_faults() -> None:
    model = tiny_model()
    ours = generate(Target(model), _none(), prompts_of(7), max_new_tokens=6)[0].ids
    index, token = 3, ours[3]
    twin = next(i for i in range(128) if i not in ours)
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[token]
    theirs = [*ours[:index], twin, 1, 2]
    found = compare(Target(model), prompts_of(7)[0], ours, theirs)
    assert found is not None
    assert (found.index, found.near_tie) == (index, True)
    with torch.no_grad():
        model.lm_head.weight[twin] *= 0.5
        prefix = torch.tensor([[*prompts_of(7)[0], *ours[:index]]])
        logits = model(prefix).logits[0, -1]
    found = compare(Target(model), prompts_of(7)[0], ours, theirs)
    assert found is not None
    assert found.gap == pytest.approx(float(logits[token] - logits[twin]), rel=1e-4)
    assert not found.near_tie


def test_near_ties_per_thousand_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three outputs of 13 parts at its sixth token: 1 of 13 + 13 + 6 compared."""
    model = tiny_model(vocab_size=VOCAB_SIZE, num_hidden_layers=2).bfloat16()
    target = Target(model, tiny_tokenizer(), name="tiny")
    drafter = contenders(target, [Spec.parse("ngram:gamma=3")])[0]
    measured = measure(target, [drafter], PROMPTS, replace(QUICK, repeats=1))
    plain = [one.outputs[0].ids for one in measured.baseline.passes]
    for ids, one in zip(plain, drafter.passes, strict=True):
        one.outputs[0].ids[:] = ids
    drafter.passes[0].outputs[0].ids[5] += 1
    monkeypatch.setattr("inference.compare.tolerance", lambda *_: float("inf"))
    result = summarise(measured, "x")
    assert result["settings"]["dtype"] == "bfloat16"
    one = result["drafters"][0]
    assert (one["identical"], one["near_ties"], one["compared_tokens"]) == (2, 1, 32)
    assert one["near_ties_per_thousand"] == 1000 / 32
    console = Console(width=120, record=True, file=StringIO())
    console.print(table(result))
    text = console.export_text()
    assert "tiny, bfloat16, fast, T=0" in text
    assert "ties/k" in text
    assert "2/3+1" in text
    assert "31.2" in text
    assert "..." not in text.splitlines()[2]


def _none() -> Any:
    return contenders(tiny_target(), [Spec.parse("none")])[0].drafter


def test_first_differences() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    target = tiny_target()
    assert compare(target, [1], [1, 2], [1, 2]) is None
    found = compare(target, [1], [1, 2, 3], [1, 2])
    assert found is not None
    assert (found.gap, found.near_tie) == (None, False)


def test_tolerances() -> None:
    assert tolerance(torch.float32, 20.0) == 1e-4
    # bfloat16 keeps 8 significant bits: 16..32 in steps of 1/8, 1..2 in steps of 1/128
    for logit, step in ((20.0, 1 / 8), (16.0, 1 / 8), (1.5, 1 / 128), (0.75, 1 / 256)):
        assert tolerance(torch.bfloat16, logit) == step
        value = torch.tensor(logit, dtype=torch.bfloat16)
        above = (value.view(torch.int16) + 1).view(torch.bfloat16)
        assert float(above - value) == step


def test_loops_are_taken_out_of_both_sides(measured: Measurement) -> None:
    race = [measured.baseline, *measured.drafters]
    for one in race:
        for output in (o for p in one.passes for o in p.outputs):
            marks, start = looped(output.ids), 1
            for r in output.rounds:
                assert r.looped == any(marks[start : start + r.emitted])
                start += r.emitted
            assert start == len(output.ids)
    result = summarise(measured, "x")["drafters"][0]
    rounds = [r for p in measured.drafters[0].passes for o in p.outputs for r in o.rounds]
    kept = [r for r in rounds if not r.looped]
    assert result["without_loops"]["rounds"] == len(kept)
    assert result["without_loops"]["tau"] == sum(r.emitted for r in kept) / len(kept)


def test_costs_by_hand() -> None:
    costs = Costs({1: [0.02, 0.5, 0.01], 4: [0.026], 8: [0.028, 0.032]})
    assert costs.step == 0.02
    assert costs.of(2) == pytest.approx(0.022)
    assert costs.of(6) == pytest.approx(0.028)
    assert costs.relative() == {"1": 1.0, "4": pytest.approx(1.3), "8": pytest.approx(1.5)}
    cost = RoundCost(draft=0.004, build=0.001, verify=0.026, commit=0.001)
    plain = RoundCost(draft=0.0, build=0.0005, verify=0.02, commit=0.0015)
    assert predicted_speedup(1.6, cost, plain) == pytest.approx(1.6 * 0.022 / 0.032)
    assert break_even_tau(0.032, 0.02) == pytest.approx(1.6)
    assert cost_ratio(0.004, 4, 0.02) == pytest.approx(0.05)


def test_t_of_n_leaves_the_cache_as_it_was() -> None:
    target = tiny_target()
    meter = CostMeter(target, list(range(20)), rows=2, sizes=[3, 5])
    before = meter.cache.lengths.clone()
    for _ in range(3):
        meter.sample()
    assert torch.equal(meter.cache.lengths, before)
    assert before.tolist() == [20, 20]
    assert {n: len(times) for n, times in meter.times.items()} == {1: 3, 3: 3, 5: 3}
    assert meter.costs.step > 0


def test_mistakes_before_any_work(target: Target) -> None:
    twice = [Spec.parse("ngram"), Spec.parse("ngram")]
    with pytest.raises(UserError, match="drafter 'ngram' is given twice"):
        contenders(target, twice)
    with pytest.raises(UserError, match=r"prompt 7 has 2\d\d tokens and the context of tiny"):
        measure(target, [], [Prompt("7", "a", ("x" * 260,))], QUICK)
    with pytest.raises(UserError, match="repeats is 0: give 1 or more"):
        BenchSettings(repeats=0)
    with pytest.raises(UserError, match="max_new_tokens is 1: give 2 or more"):
        BenchSettings(max_new_tokens=1)


def test_one_folder_is_loaded_once_for_all_its_shapes(target: Target) -> None:
    a, b, c = contenders(
        target, [Spec.parse("ngram:gamma=2"), Spec.parse("ngram"), Spec.parse("ngram:longest=3")]
    )
    assert a.drafter is b.drafter
    assert a.drafter is not c.drafter

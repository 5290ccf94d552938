"""Runs held together: pairs of prompts, verdicts, and what cannot be compared."""

from typing import Any

import pytest

from inference.page.curves import lines, oracle
from inference.page.tables import tex
from inference.regression import compare_runs
from inference.stats import Work, change, distinct


def entry(seconds: float = 1.0, rounds: int = 10, **changes: Any) -> dict[str, Any]:
    prompts = [
        {
            "question_id": str(number),
            "category": "chat",
            "tokens": 20 + number,
            "rounds": rounds + number,
            "seconds": seconds * (1 + number),
            "plain_tokens": 20 + number,
            "plain_seconds": 2.0 * (1 + number),
        }
        for number in range(4)
    ]
    tokens = sum(p["tokens"] for p in prompts)
    return {
        "name": "d:gamma=2",
        "method": "d",
        "growth": "chain",
        "shape": {"gamma": 2},
        "nodes": 2,
        "verify_mode": "lossless",
        "tau": tokens / sum(p["rounds"] for p in prompts),
        "tau_interval": (1.5, 2.0),
        "speedup": 2.0 / seconds,
        "speedup_interval": (1.9 / seconds, 2.1 / seconds),
        "by_prompt": prompts,
        **changes,
    }


def result(*drafters: dict[str, Any]) -> dict[str, Any]:
    return {"settings": {"rows": 1}, "target": {}, "machine": {}, "drafters": list(drafters)}


def test_a_slower_run_regressed_in_pairs_and_a_tolerance_forgives_it() -> None:
    found = compare_runs(result(entry()), result(entry(seconds=1.25)))
    [line] = found["drafters"]
    assert line["prompts_in_pairs"] == 4
    assert line["speedup"]["ratio"] == pytest.approx(0.8)
    assert line["speedup"]["interval"] == pytest.approx((0.8, 0.8))
    assert (line["speedup"]["verdict"], line["tau"]["verdict"]) == ("regressed", "same")
    assert found["regressions"] == ["d:gamma=2: speedup fell from 2.000 to 1.600"]
    assert not compare_runs(result(entry()), result(entry(seconds=1.25)), 0.25)["regressions"]


def test_without_prompts_intervals_must_not_touch() -> None:
    old = entry(by_prompt=[])
    apart = compare_runs(result(old), result(entry(seconds=1.25, by_prompt=[])))
    assert apart["drafters"][0]["speedup"]["verdict"] == "regressed"
    touching = compare_runs(result(old), result(entry(seconds=1.05, by_prompt=[])))
    assert touching["drafters"][0]["speedup"]["verdict"] == "same"
    single = compare_runs(result(old), result(entry(by_prompt=[], speedup_interval=None)))
    assert single["drafters"][0]["speedup"]["verdict"] == "unknown"


def test_outputs_that_broke_are_a_regression_whatever_the_speed() -> None:
    found = compare_runs(result(entry(different=0)), result(entry(seconds=0.5, different=2)))
    assert found["regressions"] == ["d:gamma=2: 2 outputs differ from plain decoding's"]


def test_drafters_of_one_shape_are_told_apart_by_name() -> None:
    run = result(entry(name="a/best"), entry(seconds=2.0, name="b/best"))
    found = compare_runs(run, run)
    assert [one["name"] for one in found["drafters"]] == ["a/best", "b/best"]
    assert {one["speedup"]["ratio"] for one in found["drafters"]} == {1.0}
    other = result(entry(name="c/best"))  # alone, it may lie anywhere
    assert compare_runs(result(entry(name="a/best")), other)["drafters"]
    changed = {**result(), "settings": {"rows": 4}}
    assert compare_runs(run, changed)["missing"] == ["a/best", "b/best"]
    assert compare_runs(run, changed)["warnings"] == ["rows differs: 1 and 4"]


def test_a_change_is_a_ratio_of_two_speedups() -> None:
    new, old = (Work(10, 1), Work(10, 4)), (Work(10, 2), Work(10, 4))
    assert change([new], [old]).value == 2.0
    with pytest.raises(ValueError, match="1 prompts against 2"):
        change([new], [old, old])


def test_distinct_4_counts_within_outputs() -> None:
    assert distinct([[1, 2, 3, 4, 5], [1, 2, 3, 4]]) == 1.0
    assert distinct([[7] * 7]) == 1 / 4
    assert distinct([[1, 2, 3]]) is None


def test_predicted_curve_and_oracle_follow_from_costs() -> None:
    one = entry(
        alpha_by_depth=[0.9, 0.5],  # of the rounds that drafted: the others accept nothing
        survival_by_depth=[0.5, 0.25],
        cost_ratio=0.1,
        round_seconds=2.0,
        time_share={"draft": 0.1, "build": 0.05, "verify": 0.8, "commit": 0.05},
    )
    run = {
        **result(one),
        "verify_cost": {"1": 1.0, "3": 1.5},
        "verify_seconds": {"1": 1.0},
        "baseline": {
            "round_seconds": 1.25,
            "time_share": {"draft": 0.0, "build": 0.02, "verify": 0.9, "commit": 0.08},
        },
    }
    [line] = lines(run, ["d"])
    # gamma 1: 1.5 tokens for .1 + .1 + T(2) 1.25 + .1; gamma 2: 1.75 for .2 + .1 + 1.5 + .1
    # a plain round: T(1) and .125 of the engine's own
    assert line.predicted == [
        (1, 1.5, pytest.approx(1.5 * 1.125 / 1.55)),
        (2, 1.75, pytest.approx(1.75 * 1.125 / 1.9)),
    ]
    assert oracle(run) == [(0, 1.0), (2, 2.0)]


def test_latex_prints_texts_as_they_are() -> None:
    assert tex(r"a_b & 5% \x{}") == r"a\_b \& 5\% \textbackslash{}x\{\}"

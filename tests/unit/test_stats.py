"""Metrics against values worked by hand, and against plain decoding's laws."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.stats import (
    Estimate,
    Round,
    Work,
    acceptance,
    looped,
    rate,
    ratio_of_medians,
    speedup,
)


def scripted(accepts: list[int], gamma: int) -> list[Round]:
    """Rounds of a chain of gamma that accept so many drafts each."""
    return [Round(a, min(a + 1, gamma), gamma, a + 1) for a in accepts]


def test_a47_four_rounds_of_a_chain_of_four() -> None:
    found = acceptance(scripted([2, 0, 4, 1], 4))
    assert found.accepted_per_round == 1.75
    assert found.tau == 2.75
    assert found.acceptance_rate == 0.4375
    assert (found.tokens, found.rounds) == (11, 4)
    assert found.alpha == 7 / 10
    assert found.alpha_by_depth == (3 / 4, 2 / 3, 1 / 2, 1 / 1)
    assert found.survival_by_depth == (0.75, 0.5, 0.25, 0.25)


def test_a47_four_rounds_of_a_chain_of_three() -> None:
    found = acceptance(scripted([2, 0, 3, 1], 3))
    assert found.accepted_per_round == 1.5
    assert found.tau == 2.5
    assert found.acceptance_rate == 0.5
    assert found.tokens == 10
    assert found.alpha == 2 / 3
    assert found.alpha_by_depth == (3 / 4, 2 / 3, 1 / 2)
    assert found.survival_by_depth == (0.75, 0.5, 0.25)


def test_a48_the_order_of_prompts_and_their_lengths_do_not_matter() -> None:
    prompts = [scripted([4] * 2, 4), scripted([0] * 7, 4), scripted([1] * 3, 4)]
    rounds = [r for prompt in prompts for r in prompt]
    assert acceptance(rounds) == acceptance(rounds[::-1])
    # the mean over prompts would be (5 + 1 + 2) / 3
    assert acceptance(rounds).tau == (2 * 5 + 7 * 1 + 3 * 2) / 12


def test_a_stop_inside_the_accepted_run_leaves_no_bonus() -> None:
    # three drafts accepted, the stop at the second: two tokens, both drafted, none after them
    found = acceptance([Round(2, 2, 4, 2)])
    assert (found.tau, found.alpha, found.survival_by_depth) == (2.0, 1.0, (1.0, 1.0))


def test_plain_decoding_and_nothing_at_all() -> None:
    plain = acceptance([Round(0, 0, 0, 1)] * 3)
    assert (plain.tau, plain.alpha, plain.acceptance_rate) == (1.0, None, None)
    assert plain.alpha_by_depth == plain.survival_by_depth == ()
    nothing = acceptance([])
    assert (nothing.tau, nothing.alpha, nothing.accepted_per_round) == (None, None, None)


@given(st.lists(st.integers(0, 5), min_size=1))
def test_tau_is_one_plus_the_sum_of_survivals(accepts: list[int]) -> None:
    found = acceptance(scripted(accepts, 5))
    assert found.tau is not None
    assert math.isclose(found.tau, 1 + sum(found.survival_by_depth))
    assert 1 <= found.tau <= 6
    running = 1.0
    for alpha, survival in zip(found.alpha_by_depth, found.survival_by_depth, strict=True):
        running *= alpha
        assert math.isclose(running, survival, abs_tol=1e-12)


def test_simulated_chains_follow_the_closed_form() -> None:
    coins, alpha, gamma = random.Random(0), 0.8, 5
    accepts = []
    for _ in range(40000):
        accepted = 0
        while accepted < gamma and coins.random() < alpha:
            accepted += 1
        accepts.append(accepted)
    found = acceptance(scripted(accepts, gamma))
    # (1 - .8^6) / (1 - .8)
    assert found.tau == pytest.approx(3.689, rel=0.01)
    assert found.alpha == pytest.approx(alpha, rel=0.01)


@pytest.mark.parametrize(
    ("ids", "marks"),
    [
        ([], ""),
        ([1, 2, 3], "..."),
        ([1, 2, 3, 4, 5, 6, 7, 8], "........"),
        ([1, 2, 3, 4, 9, 1, 2, 3, 4], ".....xxxx"),
        ([7, 7, 7, 7, 7], ".xxxx"),
        ([1, 2, 3, 4, 1, 2, 3, 4, 1, 2], "....xxxxxx"),
        # three repeated tokens are no loop
        ([1, 2, 3, 9, 1, 2, 3, 8], "........"),
        ([1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5, 8], "......xxxxx."),
    ],
)
def test_looped_tokens(ids: list[int], marks: str) -> None:
    assert "".join("x" if mark else "." for mark in looped(ids)) == marks


def test_a_speedup_is_a_ratio_of_sums() -> None:
    drafter = [Work(10, 1.0), Work(100, 20.0)]
    baseline = [Work(10, 2.0), Work(100, 20.0)]
    found = speedup(drafter, baseline)
    assert found.value == pytest.approx((110 / 21) / (110 / 22))
    assert found.interval is not None
    low, high = found.interval
    # resamples hold one prompt twice or both once
    assert (low, high) == (pytest.approx(1.0), pytest.approx(2.0))


def test_equal_gains_on_unequal_prompts_leave_no_doubt() -> None:
    baseline = [Work(n, 0.03 * n) for n in (10, 20, 40, 80)]
    drafter = [Work(n, 0.02 * n) for n in (10, 20, 40, 80)]
    found = speedup(drafter, baseline)
    assert found.value == pytest.approx(1.5)
    assert found.interval == (pytest.approx(1.5), pytest.approx(1.5))


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    numbers = np.random.default_rng(3)
    covered = 0
    for _ in range(20):
        tokens = numbers.integers(20, 40, 30)
        rounds = [int(n / t) for n, t in zip(tokens, numbers.uniform(1.2, 1.8, 30), strict=True)]
        found = rate([Work(int(n), r) for n, r in zip(tokens, rounds, strict=True)])
        assert found.interval is not None
        covered += found.interval[0] <= 1.52 <= found.interval[1]
    assert covered >= 15


def test_one_prompt_has_no_interval_and_none_has_no_value() -> None:
    assert speedup([Work(4, 2)], [Work(4, 4)]) == Estimate(2.0, None)
    assert rate([]) == Estimate(None, None)
    assert rate([Work(0, 0), Work(0, 0)]) == Estimate(None, None)
    with pytest.raises(ValueError, match="1 prompts against 2"):
        speedup([Work(1, 1)], [Work(1, 1), Work(1, 1)])


def test_a_prompt_without_rounds_breaks_no_interval() -> None:
    found = rate([Work(0, 0), Work(6, 4), Work(9, 6)])
    assert found.value == 1.5
    assert found.interval == (pytest.approx(1.5), pytest.approx(1.5))


def test_a_ratio_of_medians_shrugs_at_one_slow_spell() -> None:
    found = ratio_of_medians([2.0] * 9 + [50.0], [4.0] * 9 + [80.0])
    assert found.value == 0.5
    assert found.interval == (0.5, 0.5)
    wide = ratio_of_medians([1.0, 2.0, 3.0], [2.0, 2.0])
    assert wide.value == 1.0
    assert wide.interval == (0.5, 1.5)
    assert ratio_of_medians([1.0], [2.0, 2.0]) == Estimate(0.5, None)
    assert ratio_of_medians([], [2.0]) == Estimate(None, None)

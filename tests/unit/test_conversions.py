"""Conversions on literal traces: every figure is a fraction worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.conversions import (
    SglangFigures,
    SpecBenchFigures,
    VllmFigures,
    alpha_argmax,
    alpha_greedy,
    alpha_sampled,
    as_sglang,
    as_spec_bench,
    as_vllm,
    chain_tau,
    conditional,
    draft_rate,
    even_alpha,
    survival,
    with_bonus,
    without_bonus,
)
from inference.stats import Round, Work, acceptance, rate, speedup


def scripted(accepts: list[int], gamma: int) -> list[Round]:
    return [Round(a, min(a + 1, gamma), gamma, a + 1) for a in accepts]


def test_alpha_has_three_meanings() -> None:
    p, q = (0.5, 0.375, 0.125), (0.25, 0.5, 0.25)
    assert alpha_sampled(p, q) == 0.25 + 0.375 + 0.125
    assert alpha_argmax(p, q) == 0.375
    assert alpha_greedy(p, q) == 0
    assert alpha_greedy(p, (0.5, 0.25, 0.25)) == 1


def test_a47_as_every_project_prints_it() -> None:
    """A chain of 4 accepts 2, 0, 4 and 1: 7 drafts of 16, 11 tokens in 4 rounds."""
    trace = scripted([2, 0, 4, 1], 4)
    found = acceptance(trace)
    assert found.accepted_per_round == 1.75 == without_bonus(2.75)
    assert found.tau == 2.75 == with_bonus(1.75)
    assert found.acceptance_rate == 0.4375 == draft_rate(2.75, 4)
    assert as_vllm(trace, 4) == VllmFigures(2.75, 0.4375, (0.75, 0.5, 0.25, 0.25))
    assert as_sglang(trace, 4) == SglangFigures(2.75, 0.4375)
    assert conditional(found.survival_by_depth) == pytest.approx(found.alpha_by_depth)
    assert survival(found.alpha_by_depth) == pytest.approx(found.survival_by_depth)


def test_a48_every_round_counts_whatever_the_order() -> None:
    """Prompts of 2, 7 and 3 rounds; Spec-Bench's mean is over rounds as ours is, its speed is not.

    Tokens: 2*5, 7*1, 3*2. At a second a round, plain decoding half a second a token.
    """
    prompts = [scripted([4] * 2, 4), scripted([0] * 7, 4), scripted([1] * 3, 4)]
    work = [Work(10, 2), Work(7, 7), Work(6, 3)]
    plain = [Work(10, 5), Work(7, 3.5), Work(6, 3)]
    for order in ((0, 1, 2), (2, 0, 1)):
        rounds = [r for number in order for r in prompts[number]]
        printed = as_spec_bench(rounds, [work[n] for n in order], [plain[n] for n in order])
        # its speed is the mean of 5, 1 and 2 tokens a second, not 23 / 12
        assert printed == SpecBenchFigures(23 / 12, 8 / 3, (8 / 3) / 2)
        assert acceptance(rounds).tau == printed.mean_accepted_tokens
    assert rate(work).value == 23 / 12
    assert speedup(work, plain).value == pytest.approx((23 / 12) / 2)


def test_rounds_without_a_draft_part_the_projects() -> None:
    """Two rounds of a chain of 3 accept 3 and 1; two more had nothing to draft."""
    trace = [*scripted([3, 1], 3), Round(0, 0, 0, 1), Round(0, 0, 0, 1)]
    found = acceptance(trace)
    assert (found.tau, found.acceptance_rate) == (2.0, 4 / 6)
    # vLLM leaves them out of the length, SGLang counts what they might have drafted
    assert as_vllm(trace, 3) == VllmFigures(3.0, 4 / 6, (1.0, 0.5, 0.5))
    assert as_sglang(trace, 3) == SglangFigures(2.0, 4 / 12)
    with pytest.raises(ValueError, match="no round drafted"):
        as_vllm(trace[2:], 3)


def test_positions_that_nothing_reached_stand_in_vllms_line() -> None:
    assert as_vllm(scripted([1, 0], 4), 4).per_position_rate == (0.5, 0.0, 0.0, 0.0)


def test_the_last_round_of_an_output_may_have_no_bonus() -> None:
    """Two drafts are emitted, the second is the stop: tau counts 2, accepted + 1 would be 3."""
    trace = [Round(2, 2, 4, 2)]
    assert acceptance(trace).tau == 2
    assert as_vllm(trace, 4).mean_acceptance_length == 3


@given(st.floats(0, 1), st.integers(1, 12))
def test_an_even_alpha_is_found_again(alpha: float, gamma: int) -> None:
    tau = chain_tau([alpha] * gamma, gamma)
    assert chain_tau([even_alpha(tau, gamma)] * gamma, gamma) == pytest.approx(tau, abs=1e-9)


def test_impossible_taus_are_refused() -> None:
    for tau in (0.9, 5.1):
        with pytest.raises(ValueError, match="from 1 to 5"):
            even_alpha(tau, 4)

"""Conversions: one trace of rounds in the figures that papers and serving engines print.

The same word means other numbers elsewhere: docs/metrics.md puts them side by side. Pure functions
of counts; what is counted, and when, is inference/stats.py's business.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from inference.stats import Round, Work, acceptance

Law = Sequence[float]  # probabilities by token id


def alpha_sampled(p: Law, q: Law) -> float:
    """Return P(a token drawn from q is accepted): the sum of min(p, q).

    >>> alpha_sampled((0.5, 0.25, 0.25), (0.25, 0.75, 0.0))
    0.5
    """
    return sum(map(min, p, q))


def alpha_argmax(p: Law, q: Law) -> float:
    """Return P(the drafter's most likely token is accepted), the target sampling: p(argmax q).

    >>> alpha_argmax((0.5, 0.25, 0.25), (0.25, 0.75, 0.0))
    0.25
    """
    return p[_argmax(q)]


def alpha_greedy(p: Law, q: Law) -> float:
    """Return P(the drafter's most likely token is accepted) at temperature 0: 1 or 0.

    >>> alpha_greedy((0.5, 0.25, 0.25), (0.25, 0.75, 0.0))
    0.0
    """
    return float(_argmax(p) == _argmax(q))


def _argmax(law: Law) -> int:
    return max(range(len(law)), key=law.__getitem__)


def survival(alpha: Sequence[float]) -> list[float]:
    """Return P(depth d is accepted) for d = 1, 2, ... of conditional acceptance.

    >>> survival([0.5, 0.5, 1.0])
    [0.5, 0.25, 0.25]
    """
    return list(accumulate(alpha, mul))


def conditional(survival: Sequence[float]) -> list[float]:
    """Return P(depth d is accepted if d - 1 is) for d = 1, 2, ...; ends where nothing survives.

    >>> conditional([0.5, 0.25, 0.25, 0.0, 0.0])
    [0.5, 0.5, 1.0, 0.0]
    """
    pairs = zip((1.0, *survival), survival, strict=False)
    return [here / above for above, here in pairs if above]


def chain_tau(alpha: Sequence[float], gamma: int) -> float:
    """Return emitted tokens a round of a chain of gamma; depths without an alpha accept nothing.

    With one alpha everywhere this is (1 - alpha^(gamma+1)) / (1 - alpha): Leviathan et al. 2023,
    who call it the expected number of tokens, and its measured mean block efficiency.

    >>> chain_tau([0.5, 0.5, 0.5], 2)
    1.75
    """
    return 1 + sum(survival(alpha)[:gamma])


def even_alpha(tau: float, gamma: int) -> float:
    """Return the one alpha of all depths with which a chain of gamma has this tau.

    Args:
        tau: emitted tokens a round, the bonus counted, from 1 to gamma + 1.
        gamma: drafted tokens.

    >>> round(even_alpha(3.3616, 4), 6)
    0.8

    Raises:
        ValueError: if no alpha has it.
    """
    if not 1 <= tau <= gamma + 1:
        raise ValueError(f"tau is {tau}: a chain of {gamma} emits from 1 to {gamma + 1} a round")
    return crossing(lambda alpha: chain_tau([alpha] * gamma, gamma) - tau)


def crossing(gain: Callable[[float], float]) -> float:
    """Return where from 0 to 1 a gain that rises with alpha comes up to 0; it does so at 1."""
    low, high = 0.0, 1.0
    for _ in range(60):  # halves the doubt to a float's last bit
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) < 0 else (low, middle)
    return high


def with_bonus(accepted_per_round: float) -> float:
    """Return tau of accepted drafts a round, where every round ends in a token of the target's."""
    return 1 + accepted_per_round


def without_bonus(tau: float) -> float:
    """Return accepted drafts a round of tau, where every round ends in a token of the target's."""
    return tau - 1


def draft_rate(tau: float, gamma: int) -> float:
    """Return accepted over drafted tokens of a chain that always drafts gamma: (tau - 1) / gamma.

    >>> draft_rate(2.75, 4)
    0.4375
    """
    return without_bonus(tau) / gamma


@dataclass(frozen=True)
class VllmFigures:
    """What vLLM's log line `SpecDecoding metrics` says, the rate as a share and not in percent.

    Rounds without a draft count in none of them. vLLM counts before it cuts an output at a stop, so
    its own figures of the last round of an output may be larger.

    Args:
        mean_acceptance_length: 1 + accepted / rounds with a draft.
        draft_acceptance_rate: accepted / drafted.
        per_position_rate: survival by depth, over rounds with a draft: not conditional.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    per_position_rate: tuple[float, ...]


def as_vllm(rounds: Sequence[Round], gamma: int) -> VllmFigures:
    """Return a trace of chains of gamma as vLLM prints it.

    Raises:
        ValueError: if nothing was drafted.

    Source: vllm/v1/spec_decode/metrics.py, SpecDecodingLogging.log.
    """
    drafted = [one for one in rounds if one.drafted]
    if not drafted:
        raise ValueError("no round drafted anything: vLLM prints nothing")
    found = acceptance(drafted)
    reached = found.survival_by_depth
    return VllmFigures(
        1 + found.accepted / found.rounds,
        found.accepted / found.drafted,
        (*reached, *(0.0,) * (gamma - len(reached))),
    )


@dataclass(frozen=True)
class SglangFigures:
    """What SGLang's log line says.

    Args:
        accept_len: accepted and bonus tokens / rounds: tau.
        accept_rate: accepted / (rounds * the draft tokens that were configured), drafted or not.
    """

    accept_len: float
    accept_rate: float


def as_sglang(rounds: Sequence[Round], gamma: int) -> SglangFigures:
    """Return a trace as SGLang prints it; gamma is its speculative_num_draft_tokens - 1.

    Its releases up to 0.5.6 or so counted the bonus above and below: (accepted + rounds) / (rounds
    * (gamma + 1)).

    Source: sglang/srt, scheduler metrics, log_decode_stats.
    """
    accepted = sum(one.accepted for one in rounds)
    return SglangFigures(1 + accepted / len(rounds), accepted / len(rounds) / gamma)


@dataclass(frozen=True)
class SpecBenchFigures:
    """What Spec-Bench's evaluation/speed.py prints of a category or overall.

    Args:
        mean_accepted_tokens: emitted tokens of a round, the mean over all rounds: tau.
        tokens_per_second: the mean of the questions' own speeds, not sum(tokens) / sum(seconds).
        speedup: the ratio of two such means.
    """

    mean_accepted_tokens: float
    tokens_per_second: float
    speedup: float


def as_spec_bench(
    rounds: Sequence[Round], drafter: Sequence[Work], baseline: Sequence[Work]
) -> SpecBenchFigures:
    """Return a trace as Spec-Bench prints it.

    Spec-Bench's clock includes the prefill, and it counts the baseline's tokens by tokenising its
    text again; give what the figure is to include.

    Args:
        rounds: of all questions.
        drafter: tokens and seconds of each question.
        baseline: the same of plain decoding.
    """
    speeds, plain = (_mean([w.amount / w.cost for w in work]) for work in (drafter, baseline))
    return SpecBenchFigures(_mean([one.emitted for one in rounds]), speeds, speeds / plain)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

"""Comparison: what an engine did with an exported drafter, beside what is done with it here."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from drafters.target import Target
from inference.compare import compare
from inference.generate import Output
from inference.served.job import Served


def acceptance(outputs: Sequence[Output], gamma: int) -> list[float]:
    """Return the share of our rounds that accepted position 1, 2, .. of a chain.

    Rounds that a limit or an end cut short count as an engine counts them: by what was accepted.
    """
    accepted = [count for output in outputs for count in output.accepted]
    return [sum(count >= k for count in accepted) / len(accepted) for k in range(1, gamma + 1)]


def sameness(
    target: Target,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
) -> dict[str, int]:
    """Return how many greedy outputs are equal, part at a near-tie, or differ otherwise."""
    found = [compare(target, p, a, b) for p, a, b in zip(prompts, ours, theirs, strict=True)]
    ties = sum(d is not None and d.near_tie for d in found)
    equal = sum(d is None for d in found)
    return {"equal": equal, "near_ties": ties, "different": len(found) - equal - ties}


def engine_facts(served: Served, gamma: int) -> dict[str, Any]:
    """Return an engine's own figures of acceptance.

    tau counts the verified token too; an engine that does not count its rounds is taken at its
    tokens: every emitted one but a prompt's first is an accepted draft or ends a round.
    """
    tokens = sum(len(output) - 1 for output in served.outputs)
    rounds = served.rounds or tokens - served.accepted
    at = served.accepted_at
    return {
        **{k: v for k, v in asdict(served).items() if k != "outputs"},
        "tokens_per_second": served.tokens_per_second,
        "tau": 1 + served.accepted / rounds if rounds else None,
        "acceptance": None if at is None else [count / rounds for count in at[:gamma]],
    }

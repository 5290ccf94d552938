"""Comparison: what an engine did with an exported drafter, beside what is done with it here."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from drafters.base import Drafter
from drafters.growth import Chain
from drafters.target import Target
from inference.compare import compare
from inference.generate import Generation, Output
from inference.sampling import Sampling
from inference.served.job import Served


class Decoded(NamedTuple):
    """What is done with a drafter here.

    Args:
        outputs: of each prompt.
        drafts: of each prompt, the ids drafted in a round by the number of tokens emitted before.
    """

    outputs: list[Output]
    drafts: list[dict[int, list[int]]]


def decode(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    gamma: int,
    max_new_tokens: int,
) -> Decoded:
    """Decode prompts as an engine does its jobs: greedily, in chains."""
    run = Generation(
        target, drafter, prompts, growth=Chain(gamma), sampling=Sampling(max_new_tokens)
    )
    drafts: list[dict[int, list[int]]] = [{} for _ in prompts]
    for number, commit in run:
        if commit.tree is not None:
            place = len(run.outputs[number].ids) - len(commit.emitted)
            drafts[number][place] = commit.tree.tokens[1:].tolist()
    return Decoded(run.outputs, drafts)


def same_drafts(ours: Decoded, served: Served) -> dict[str, int] | None:
    """Return in how many of an engine's rounds the same ids were drafted here.

    Rounds are of one place if the same tokens were emitted before them. Ours may draft fewer tokens
    before an output's end, which an engine ignores while it drafts: those that are there count.

    Returns:
        rounds: the engine's. met: those at a place that had a round here too. equal: those of them
        with the same ids. None if the engine does not tell what it drafted.
    """
    if served.by_round is None:
        return None
    found = {"rounds": 0, "met": 0, "equal": 0}
    for output, drafts, theirs, rounds in zip(
        ours.outputs, ours.drafts, served.outputs, served.by_round, strict=True
    ):
        place = 1
        for drafted, emitted in rounds:
            found["rounds"] += 1
            if place in drafts and output.ids[:place] == theirs[:place]:
                found["met"] += 1
                found["equal"] += drafted[: len(drafts[place])] == drafts[place]
            place += len(emitted)
    return found


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
        **{k: v for k, v in asdict(served).items() if k not in ("outputs", "by_round")},
        "tokens_per_second": served.tokens_per_second,
        "tau": 1 + served.accepted / rounds if rounds else None,
        "acceptance": None if at is None else [count / rounds for count in at[:gamma]],
    }

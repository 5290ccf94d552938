"""Passes: what one contender's decode of one batch of prompts produced, round by round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from drafters.base import Account, Commit
from inference.clock import Clock
from inference.modes import tree_mode
from inference.stats import Round, looped


@dataclass(frozen=True)
class Trace:
    """One round's tree and what became of it; the tree's laws are let go.

    Args:
        tokens: [N+1] of the tree.
        parent: [N+1] of the tree.
        path: accepted nodes, root first.
        emitted: tokens.
        phases: seconds by phase, this row's share of the batch's.
    """

    tokens: Tensor
    parent: Tensor
    path: tuple[int, ...]
    emitted: tuple[int, ...]
    phases: Mapping[str, float]


@dataclass(frozen=True)
class Decoded:
    """One prompt's output in one pass.

    Args:
        ids: emitted, the prefill's token first.
        finish_reason: why it ended.
        rounds: what each counts as.
        draft_modes: how drafts were chosen; see inference.modes.
        traces: of the same rounds.
    """

    ids: list[int]
    finish_reason: str
    rounds: list[Round]
    draft_modes: frozenset[str] = frozenset()
    traces: list[Trace] = field(default_factory=list[Trace])


@dataclass(frozen=True)
class Pass:
    """One batch of prompts decoded once by one contender.

    Args:
        repeat: which repeat, from 0.
        group: which batch of prompts, from 0.
        prompts: their numbers.
        outputs: one a prompt.
        clock: seconds by phase, prefill apart, and rounds.
        full_rounds: seconds of the rounds in which no row had ended yet.
        accounts: of a joint drafter's members, in this pass.
    """

    repeat: int
    group: int
    prompts: tuple[int, ...]
    outputs: list[Decoded]
    clock: Clock
    full_rounds: list[float]
    accounts: list[Account] = field(default_factory=list[Account])


@dataclass
class Growing:
    """One prompt's output while it grows.

    Args:
        prompt: tokens of the prompt.
        ids: emitted so far.
        finish_reason: why it ended.
        rounds: so far.
        draft_modes: how its drafts were chosen; see inference.modes.
        traces: of its rounds.
    """

    prompt: int
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    rounds: list[Round] = field(default_factory=list)
    draft_modes: set[str] = field(default_factory=set)
    traces: list[Trace] = field(default_factory=list[Trace])

    def add(self, commit: Commit, phases: Mapping[str, float]) -> None:
        """Take in a commit whose phases took this long."""
        if commit.tree is not None:
            self.rounds.append(
                Round(
                    commit.accepted,
                    commit.attempted,
                    commit.tree.drafted,
                    len(commit.emitted),
                    sum(phases.values()),
                    position=self.prompt + len(self.ids) - 1,
                )
            )
            tree = commit.tree
            self.traces.append(Trace(tree.tokens, tree.parent, commit.path, commit.emitted, phases))
            if commit.tree.drafted:
                self.draft_modes.add(tree_mode(commit.tree))
        self.ids.extend(commit.emitted)
        self.finish_reason = commit.finished

    def done(self) -> Decoded:
        """Return the finished output; its rounds say whether they lie in a loop."""
        assert self.finish_reason is not None
        marks, start, rounds = looped(self.ids), 1, []  # the first token is the prefill's
        for one in self.rounds:
            rounds.append(replace(one, looped=any(marks[start : start + one.emitted])))
            start += one.emitted
        return Decoded(
            self.ids, self.finish_reason, rounds, frozenset(self.draft_modes), self.traces
        )


def take(
    outputs: Sequence[Growing], commits: Sequence[Commit | None], phases: Mapping[str, float]
) -> None:
    """Hand every row its commit."""
    for output, commit in zip(outputs, commits, strict=False):
        if commit is not None:
            output.add(commit, phases)

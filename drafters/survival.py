"""Survival: how likely the nodes of several drafters' trees are accepted, learned as rows decode.

A ballot is one drafter's word for a node: how sure it is, or, where it does not say, the node's
place among its siblings. What a ballot was worth lately is counted by level; what several ballots
for and against one token were worth together is counted apart, so that agreement is neither taken
for independent evidence nor thrown away.
"""

# torch leaves tolist untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from drafters.growth.recent import BIN_MIDDLES, Recent, bin_of
from drafters.tree import TokenTree

_GUESS = 0.5  # acceptance of a drafter's best child before anything was judged; halved a sibling


class Ballot(NamedTuple):
    """One drafter's word for a node: kind is its confidence's bin, or -1 - place of siblings."""

    member: int
    kind: int

    @property
    def guess(self) -> float:
        """Return the acceptance it stands for before anything was judged."""
        return BIN_MIDDLES[self.kind] if self.kind >= 0 else _GUESS**-self.kind


@dataclass(frozen=True)
class Votes:
    """The ballots for a node, and the drafters that propose only other tokens in its place."""

    ballots: tuple[Ballot, ...]
    against: tuple[int, ...] = ()


class Survival:
    """What ballots of one row were worth lately.

    Args:
        learn: whether rounds are counted; if not, ballots are taken at their guesses.
    """

    def __init__(self, learn: bool = True) -> None:
        """Start with guesses."""
        self.learn = learn
        self._means = Recent()

    def chance(self, level: int, votes: Votes) -> float:
        """Return how likely a node of this level is accepted if its parent is."""
        best = max(self._alone(level, ballot) for ballot in votes.ballots)
        return self._means.mean(votes, best)

    def _alone(self, level: int, ballot: Ballot) -> float:
        everywhere = self._means.mean((0, ballot), ballot.guess)
        return self._means.mean((level, ballot), everywhere)

    def along(self, tree: TokenTree, votes: Sequence[Votes]) -> list[float]:
        """Return every node's survival, the root's 1; votes[n - 1] are those of node n.

        A drawn node counts no more than an elder drawn sibling: the younger one's law depends on
        what the elder one turned out to be, so it may not decide over the elder's place.
        """
        survival, depths = [1.0], tree.depth.tolist()
        bound: dict[int, float] = {}
        for node, parent in enumerate(tree.parent_list[1:], start=1):
            value = survival[parent] * self.chance(depths[node], votes[node - 1])
            if tree.laws is not None and tree.laws.of_list[node - 1] >= 0:
                value = bound[parent] = min(value, bound.get(parent, 1.0))
            survival.append(value)
        return survival

    def observe(self, draft: "Draft", emitted: Sequence[int]) -> None:
        """Count a round's nodes below the emitted path, those that were not submitted too.

        What was emitted follows the target's law, so a point mass is right as often as it would be
        accepted. A drawn token that was not judged is right less often: a lower bound.
        """
        if not self.learn:
            return
        for tree, votes in zip(draft.trees, draft.own, strict=True):
            for level, node, right in _followed(tree, emitted):
                [ballot] = votes[node - 1].ballots
                self._means.add((0, ballot), right)
                self._means.add((level, ballot), right)
        for _, node, right in _followed(draft.merged, emitted):
            votes = draft.joint[node - 1]
            if len(votes.ballots) + len(votes.against) > 1:
                self._means.add(votes, right)


class Draft(NamedTuple):
    """One row's round: what each drafter proposed, and all of it together, with the votes."""

    trees: list[TokenTree]
    own: list[list[Votes]]
    merged: TokenTree
    joint: list[Votes]


def _followed(tree: TokenTree, emitted: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """Yield (level, node, whether it is what was emitted) of all children along the path."""
    node = 0
    for level, token in enumerate(emitted, start=1):
        taken = [child for child in tree.children[node] if tree.token_list[child] == token]
        for child in tree.children[node]:
            yield level, child, float(child in taken)
        if not taken:
            return
        node = taken[0]


def own_votes(tree: TokenTree, member: int) -> list[Votes]:
    """Return one drafter's votes for the nodes 1..N of its own tree."""
    if tree.confidence is None:
        place = {n: i for nodes in tree.children for i, n in enumerate(nodes)}
        return [Votes((Ballot(member, -1 - place[n]),)) for n in range(1, len(tree))]
    sure = tree.confidence.tolist()
    kinds = [bin_of(math.exp(sure[n] - sure[p])) for n, p in enumerate(tree.parent_list) if n]
    return [Votes((Ballot(member, kind),)) for kind in kinds]


def joint_votes(
    merged: TokenTree, places: Sequence[Sequence[int]], own: Sequence[Sequence[Votes]]
) -> list[Votes]:
    """Return the votes for the nodes 1..N of a merged tree.

    Args:
        merged: from `merge`.
        places: each tree's nodes as nodes of it.
        own: each tree's own votes.
    """
    ballots: list[list[Ballot]] = [[] for _ in range(len(merged))]
    for nodes, votes in zip(places, own, strict=True):
        for place, vote in zip(nodes[1:], votes, strict=True):
            ballots[place] += vote.ballots
    found: list[Votes] = []
    for node, parent in enumerate(merged.parent_list[1:], start=1):
        beside = {b.member for child in merged.children[parent] for b in ballots[child]}
        against = beside - {ballot.member for ballot in ballots[node]}
        found.append(Votes(tuple(ballots[node]), tuple(sorted(against))))
    return found

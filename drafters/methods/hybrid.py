"""`hybrid`: several drafters draft together, in one tree.

Every member drafts below the same root with a growth of its own; the trees are merged
(drafters/merge.py) and the nodes that promise most are submitted, by what each member's word was
worth on this row lately (drafters/survival.py). Drawn nodes are chosen before anything that
depends on their tokens is looked at. Source: merge-based trees as in SpecInfer (Miao et al. 2024);
free and trained drafters together as in SuffixDecoding (Oliaro et al. 2024).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from drafters.base import Account, Commit, Drafter, Features, ReadsCache
from drafters.cache import KVCache
from drafters.errors import UserError
from drafters.growth import Growth
from drafters.merge import merge
from drafters.registry import build_drafter, joins_drafters, register
from drafters.sampling import RowRandom, Warp
from drafters.session import by_row
from drafters.shape import TargetShape
from drafters.survival import Draft, Survival, joint_votes, own_votes
from drafters.target import Target
from drafters.tree import TokenTree


@register
@joins_drafters
class HybridDrafter:
    """Several drafters as one.

    Args:
        members: the drafters, two or more; where two promise alike, the earlier one's nodes stay.
        learn: whether a row learns from its rounds what each member is worth; if not, every member
            is taken at its word, and a row's drafts depend on its text alone.

    Raises:
        UserError: if there are fewer than two.
    """

    name: ClassVar[str] = "hybrid"

    def __init__(self, members: Sequence[Drafter], learn: bool = True) -> None:
        """Keep the members and read what all of them read."""
        if len(members) < 2:
            raise UserError(
                f"drafter {self.name} joins two drafters or more: give A+B, such as ngram+FOLDER"
            )
        self.members, self.learn = list(members), learn
        read = [member.features for member in members]
        layers = sorted({layer for features in read for layer in features.layers})
        self.features = Features(tuple(layers), any(features.last for features in read))

    @classmethod
    def build(cls, options: Mapping[str, object], shape: TargetShape) -> "HybridDrafter":
        """Make one from `members`, drafters or names of families without weights, and `learn`.

        Raises:
            UserError: on another option or a wrong type.
        """
        unknown = set(options) - {"members", "learn"}
        members, learn = options.get("members", ()), options.get("learn", True)
        if unknown or not isinstance(members, list | tuple) or not isinstance(learn, bool):
            raise UserError(
                f"drafter {cls.name} has no options {', '.join(sorted(unknown)) or 'like these'}: "
                "give A+B, and every part its own"
            )
        parts = cast("Sequence[Any]", members)
        return cls([build_drafter(m, {}, shape) if isinstance(m, str) else m for m in parts], learn)

    def options(self) -> dict[str, object]:
        """Return the members by name, with their options."""
        members = [{"name": m.name, **m.options()} for m in self.members]
        return {"members": members, "learn": self.learn}

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "HybridSession":
        """Start a session of every member."""
        return HybridSession(self, target, growth, rows, capacity)


class HybridSession:
    """One session a member; all see the same commits.

    Args:
        drafter: the members.
        target: decides.
        growth: the shape of the merged tree; members grow by `growth.member`.
        rows: batch size.
        capacity: tokens a row may hold.
    """

    def __init__(
        self, drafter: HybridDrafter, target: Target, growth: Growth, rows: int, capacity: int
    ) -> None:
        """Start the members."""
        self.features, self.growth, self.learn = drafter.features, growth, drafter.learn
        self.growths = [growth.member(index, rows) for index in range(len(drafter.members))]
        self.sessions = [
            member.start(target, own, rows, capacity)
            for member, own in zip(drafter.members, self.growths, strict=True)
        ]
        self.accounts = [Account() for _ in self.sessions]
        self.roots = [0] * rows
        self.survival = [Survival(self.learn) for _ in range(rows)]
        self.proposed: list[list[TokenTree | None]] = [[None] * rows for _ in self.sessions]
        self.drafts: dict[int, Draft] = {}

    def read_cache(self, cache: KVCache) -> None:
        """Show the target's cache to the members that read it."""
        for session in self.sessions:
            if isinstance(session, ReadsCache):
                session.read_cache(cache)

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Tell every member what became final, and its growth what it alone would have got."""
        for session, growth, trees, account in zip(
            self.sessions, self.growths, self.proposed, self.accounts, strict=True
        ):
            start = time.perf_counter()
            features = session.features
            session.observe([c and _read(c, self.features, features) for c in commits])
            account.seconds += time.perf_counter() - start
            alone = [c and _alone(c, t) for c, t in zip(commits, trees, strict=True)]
            growth.observe(alone)
            account.accepted += sum(c.accepted for c in alone if c is not None)
        for row, commit in enumerate(commits):
            if commit is None:
                continue
            self.roots[row] = commit.root
            if commit.tree is None:
                self.survival[row] = Survival(self.learn)
            elif row in self.drafts:
                self.survival[row].observe(self.drafts[row], commit.emitted)
        self.drafts.clear()
        self.proposed = [[None] * len(commits) for _ in self.sessions]

    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        """Ask every member that pays, and submit what promises most of all their trees."""
        self.proposed = [self._ask(index, warp, random) for index in range(len(self.sessions))]
        chosen: dict[int, TokenTree] = {}
        for row, coins in enumerate(random):
            found = {i: trees[row] for i, trees in enumerate(self.proposed)}
            drafted = {i: tree for i, tree in found.items() if tree and tree.drafted}
            if coins is not None and drafted:
                self.drafts[row], chosen[row] = choose(drafted, self.survival[row], self.growth)
        return by_row(chosen, self.roots, random)

    def _ask(
        self, index: int, warp: Warp, random: Sequence[RowRandom | None]
    ) -> list[TokenTree | None]:
        """Return a member's trees; none where its own growth says that it does not pay."""
        if not self.growths[index].levels:
            return [None] * len(random)
        account, start = self.accounts[index], time.perf_counter()
        trees = self.sessions[index].propose(warp, random)
        account.seconds += time.perf_counter() - start
        account.rounds += sum(tree is not None for tree in trees)
        account.drafted += sum(tree.drafted for tree in trees if tree is not None)
        return trees


def choose(
    drafted: Mapping[int, TokenTree], survival: Survival, growth: Growth
) -> tuple[Draft, TokenTree]:
    """Merge the members' trees and keep the nodes that promise most.

    Drawn nodes first: the best `growth.nodes` of all nodes by their own member's word alone, in
    which nothing depends on the token that is decided over. Point masses then fill what is left,
    by all votes.

    Args:
        drafted: trees by member.
        survival: of the row.
        growth: gives the budget.

    Returns:
        What was proposed, and the tree to submit.
    """
    trees = list(drafted.values())
    own = [own_votes(tree, member) for member, tree in drafted.items()]
    settled, votes = _settle_drawn(trees, own, survival, growth.nodes)
    merged, places = merge(settled)
    joint = joint_votes(merged, places, votes)
    values = survival.along(merged, joint)
    kept = {0}
    for node in range(1, len(merged)):
        if merged.laws is not None and merged.laws.of_list[node - 1] >= 0:
            kept.update(merged.path(node))
    order = sorted(range(1, len(merged)), key=lambda node: (-values[node], node))
    budget = growth.budget([values[node] for node in order])
    free = [node for node in order[:budget] if node not in kept]
    kept.update(free[: max(0, growth.nodes - len(kept) + 1)])
    tree = replace(merged, confidence=torch.tensor(values).log())
    return Draft(trees, own, merged, joint), tree.keep(sorted(kept))


def _settle_drawn(
    trees: list[TokenTree], own: list[list[Any]], survival: Survival, nodes: int
) -> tuple[list[TokenTree], list[list[Any]]]:
    """Return the trees without the drawn nodes that the budget has no room for, and their votes."""
    if all(tree.laws is None for tree in trees):
        return trees, own
    ranked: list[tuple[float, int, int]] = []
    for index, (tree, votes) in enumerate(zip(trees, own, strict=True)):
        values = survival.along(tree, votes)
        ranked += [(-values[node], index, node) for node in range(1, len(tree))]
    best = {(index, node) for _, index, node in sorted(ranked)[:nodes]}
    settled: list[TokenTree] = []
    kept_votes: list[list[Any]] = []
    for index, (tree, votes) in enumerate(zip(trees, own, strict=True)):
        kept = [0]
        for node, parent in enumerate(tree.parent_list[1:], start=1):
            drawn = tree.laws is not None and tree.laws.of_list[node - 1] >= 0
            if parent in kept and (not drawn or (index, node) in best):
                kept.append(node)
        settled.append(tree.keep(kept))
        kept_votes.append([votes[node - 1] for node in kept[1:]])
    return settled, kept_votes


def _read(commit: Commit, union: Features, wanted: Features) -> Commit:
    """Return the commit with the features that one member reads."""
    taps, last = commit.taps, commit.last if wanted.last else None
    if taps is not None and wanted.layers != union.layers:
        taps = _columns(taps, union, wanted) if wanted.layers else None
    return replace(commit, taps=taps, last=last)


def _columns(taps: Tensor, union: Features, wanted: Features) -> Tensor:
    each = taps.unflatten(-1, (len(union.layers), -1))
    return each[:, [union.layers.index(layer) for layer in wanted.layers]].flatten(1)


def _alone(commit: Commit, tree: TokenTree | None) -> Commit:
    """Return what a member's own tree would have got of what was emitted.

    Nothing is known behind the emitted tokens: where the tree goes on, the round counts as cut.
    """
    if commit.tree is None:
        return commit
    tree = TokenTree.chain([commit.tree.root]) if tree is None else tree
    path = [0]
    for token in commit.emitted[:-1]:
        child = tree.child(path[-1], token)
        if child is None:
            break
        path.append(child)
    emitted = commit.emitted[: len(path)]
    cut = len(emitted) == len(commit.emitted)
    return Commit(
        tree.tokens[torch.tensor(path)],
        emitted[-1],
        tree=tree,
        finished="length" if cut else commit.finished,
        emitted=emitted,
        path=tuple(path),
    )

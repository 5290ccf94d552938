"""Cost-aware: a node is added while its survival pays for the time that it costs.

Survival is the product of chances along the path: what the drafter's confidence was worth lately,
per level (drafters/growth/ledger.py). Trees of point masses are grown level by level while another
level promises to pay, and cut to the nodes that do. A drawn chain is decided node by node before
the node is drawn, by its law and what was drawn above it, so no token decides over itself.
Source: the marginal rule of EAGLE-2 (Li et al. 2024), Sequoia (Chen et al. 2024) and OPT-Tree (Wang
et al. 2024), with measured costs.
"""

# torch leaves tolist untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NoReturn

import torch
from torch import Tensor

from drafters.base import Commit
from drafters.errors import UserError
from drafters.frontier import Frontier
from drafters.growth.base import (
    DRAFT_MODES,
    Confident,
    Guesser,
    check_draft,
    check_size,
    drawable,
    target_ids,
)
from drafters.growth.dynamic import best_children
from drafters.growth.ledger import Ledger
from drafters.growth.prices import Prices
from drafters.growth.rows import DrawnRow, ScoredRow
from drafters.sampling import Coin, Warp
from drafters.tree import TokenTree


@dataclass(frozen=True)
class CostAware:
    """What a cost-aware tree may be at most; `priced` makes a growth of it.

    Args:
        nodes: drafted nodes a row at most.
        width: nodes expanded a level, and children of each, at most; drawn drafts are chains.
        depth: levels at most.
        draft: argmax (the most likely children) or sampled (a chain drawn from the drafter's law).
    """

    nodes: int = 8
    width: int = 3
    depth: int = 6
    draft: str = "argmax"

    def __post_init__(self) -> None:
        """Check the values."""
        check_size(self.nodes, "nodes")
        check_size(self.width, "width")
        check_size(self.depth, "depth")
        check_draft(self.draft, DRAFT_MODES, "cost_aware")

    @property
    def cells(self) -> int:
        """Return the nodes that are expanded."""
        return self.expanded * (self.depth - 1)

    @property
    def expanded(self) -> int:
        """Return the nodes expanded a level."""
        return self.width if self.draft == "argmax" else 1

    @property
    def levels(self) -> int:
        """Return the depth."""
        return self.depth

    def priced(self, prices: Prices, members: Sequence[Prices] = ()) -> "CostAwareGrowth":
        """Return the growth that decides by these costs; `members`: of a joint drafter's, each."""
        return CostAwareGrowth(self, prices, members)

    def start(self, rows: int) -> NoReturn:
        """Refuse: costs are needed.

        Raises:
            UserError: always.
        """
        _refuse()

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Learn nothing: `priced` does."""

    def grow(
        self, roots: Sequence[int], guesser: Guesser, warp: Warp, coins: Sequence[Coin]
    ) -> list[TokenTree]:
        """Refuse: costs are needed; see `start`."""
        _refuse()

    def member(self, index: int, rows: int) -> NoReturn:
        """Refuse: costs are needed; see `start`."""
        _refuse()

    def budget(self, survivals: Sequence[float]) -> int:
        """Refuse: costs are needed; see `start`."""
        _refuse()


def _refuse() -> NoReturn:
    raise UserError(
        "growth cost_aware decides by measured costs and got none: give "
        "CostAware(...).priced(prices); inference.pricing.priced measures them"
    )


class CostAwareGrowth:
    """The growth of one decoder's rows.

    Args:
        limits: what trees may be at most.
        prices: measured costs of this drafter, target, number of rows and context.
        members: of a joint drafter's, each alone.
    """

    _drafted: int  # levels of the round under way, once its trees are grown

    def __init__(self, limits: CostAware, prices: Prices, members: Sequence[Prices] = ()) -> None:
        """Start without history."""
        self.limits, self.prices, self.members = limits, prices, members
        self.ledger = Ledger(prices, limits.depth)
        self._trees: list[TokenTree] = []  # of the round under way

    def __repr__(self) -> str:
        return f"CostAwareGrowth({self.limits})"

    @property
    def depth(self) -> int:
        """Return the largest number of levels."""
        return self.limits.depth

    @property
    def draft(self) -> str:
        """Return how tokens are chosen."""
        return self.limits.draft

    @property
    def nodes(self) -> int:
        """Return the largest number of drafted nodes."""
        return self.limits.nodes

    @property
    def cells(self) -> int:
        """Return the nodes that are expanded at most."""
        return self.limits.cells

    @property
    def expanded(self) -> int:
        """Return the nodes expanded a level at most."""
        return self.limits.expanded

    @property
    def levels(self) -> int:
        """Return the levels that are expected to pay; 0 where drafting does not."""
        return min(self.limits.nodes, self.ledger.levels)

    def start(self, rows: int) -> "CostAwareGrowth":
        """Return one without history."""
        return CostAwareGrowth(self.limits, self.prices, self.members)

    def member(self, index: int, rows: int) -> "CostAwareGrowth":
        """Return a member's own, without history: it sleeps where that member alone earns less."""
        return CostAwareGrowth(self.limits, self.members[index] if self.members else self.prices)

    def budget(self, survivals: Sequence[float]) -> int:
        """Return how many nodes pay; one in a trial, which would teach nothing without any."""
        count = self.ledger.worth(survivals, 1)
        return max(1, count) if self.ledger.asleep else count

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Count what a round accepted."""
        judged = [c for c in commits if c is not None and c.tree is not None]
        if judged:
            reaches = [self._reach(c.tree) for c in judged if c.tree is not None]
            self.ledger.observe(judged, self.levels, reaches)

    def _reach(self, tree: TokenTree) -> int:
        """Return the levels drafted for a row; the tree's own if it was cut or not grown here."""
        if any(tree is own for own in self._trees):
            return self._drafted
        return int(tree.depth.max())

    def grow(
        self, roots: Sequence[int], guesser: Guesser, warp: Warp, coins: Sequence[Coin]
    ) -> list[TokenTree]:
        """Grow one tree a row; the root alone where nothing pays."""
        drawn = self.draft == "sampled" and not warp.greedy
        if drawn:
            self._trees = self._draw(roots, guesser, warp, coins)
        else:
            self._trees = self._choose(roots, guesser)
        return self._trees

    def _choose(self, roots: Sequence[int], guesser: Guesser) -> list[TokenTree]:
        """Grow trees of point masses and cut them to the nodes that pay."""
        rows = [ScoredRow(root) for root in roots]
        logits, trial = guesser.root_logits()[:, None], self.ledger.asleep
        for level in count(1):
            self._drafted = level
            self._add(rows, level, logits, guesser)
            if level == self.depth or trial:
                break
            reached = sum(row.reach() for row in rows) / len(rows)
            nodes = sum(map(len, self._kept(rows))) / len(rows)
            if self.ledger.promise(reached, level, nodes)[0] <= 0:
                break
            logits = guesser.step(_frontier(rows, level, logits.device))
        kept = self._kept(rows)
        if trial:  # a trial that drafts nothing would teach nothing
            kept = [nodes or [0] for nodes in kept]
        return [row.tree(nodes) for row, nodes in zip(rows, kept, strict=True)]

    def _add(self, rows: list[ScoredRow], level: int, logits: Tensor, guesser: Guesser) -> None:
        """Score the best children of every frontier node and choose the next frontier."""
        value, choice = best_children(logits, self.limits.expanded)
        sure = chances(guesser)
        value = value if sure is None else confident_scores(value, sure)
        scores, tokens = value.tolist(), target_ids(choice, guesser.ids).tolist()
        for row, below, found in zip(rows, scores, tokens, strict=True):
            row.add(level, below, found, self.ledger)
        width = min(self.limits.expanded, min(len(row.newest) for row in rows))
        for row in rows:
            row.choose(width)

    def _kept(self, rows: list[ScoredRow]) -> list[list[int]]:
        """Return the nodes of every row that pay, in order of creation.

        A node's survival never exceeds its parent's and equal ones keep their order, so parents of
        kept nodes are kept.
        """
        order = sorted(
            ((-s, place, number) for number, row in enumerate(rows) for s, place in row.best()),
        )
        taken = [0] * len(rows)
        allowed: list[tuple[float, int, int]] = []
        for negative, place, number in order:
            if taken[number] < self.nodes:
                taken[number] += 1
                allowed.append((negative, place, number))
        count = self.ledger.worth([-negative for negative, _, _ in allowed], len(rows))
        kept: list[list[int]] = [[] for _ in rows]
        for _, place, number in allowed[:count]:
            kept[number].append(place)
        return [sorted(nodes) for nodes in kept]

    def _draw(
        self, roots: Sequence[int], guesser: Guesser, warp: Warp, coins: Sequence[Coin]
    ) -> list[TokenTree]:
        """Grow drawn chains: whether a token is submitted is settled before it is drawn."""
        rows = [DrawnRow(root) for root in roots]
        trial, deepest = self.ledger.asleep, min(self.depth, self.nodes)
        logits = guesser.root_logits()
        straight = torch.zeros(len(rows), 1, dtype=torch.int64, device=logits.device)
        nodes = 0.0
        for level in count(1):
            self._drafted = level
            laws = drawable(warp, logits, guesser.ids)
            sure = chances(guesser)
            modes = (laws.probs.amax(1) if sure is None else sure[:, 0]).tolist()
            for place, (row, mode) in enumerate(zip(rows, modes, strict=True)):
                survival = row.survival * self.ledger.chance(level, mode)
                row.open = row.open and (
                    trial or self.ledger.pays(survival, level, nodes, len(rows))
                )
                if row.open:
                    nodes += 1 / len(rows)
                    row.add(coins[place].draw(laws.law(place)), survival, mode, laws.probs[place])
            if level == deepest or trial:
                break
            reached = sum(row.survival for row in rows if row.open) / len(rows)
            if self.ledger.promise(reached, level, nodes)[0] <= 0:
                break
            newest = torch.tensor([[row.last] for row in rows], device=logits.device)
            logits = guesser.step(Frontier(newest, straight, level))[:, 0]
        return [row.tree(guesser.ids) for row in rows]


def chances(guesser: Guesser) -> Tensor | None:
    """Return how likely a draft after each node asked for last is accepted [R, F], if known."""
    return guesser.confidence() if isinstance(guesser, Confident) else None


def confident_scores(value: Tensor, sure: Tensor) -> Tensor:
    """Return log chances of children whose best one has the chance `sure`.

    What is left is shared among the others as their law has it.

    Args:
        value: [R, F, W] log q, the best child first.
        sure: [R, F].
    """
    q = value.exp()
    left = (1 - sure) / (1 - q[..., 0]).clamp_min(torch.finfo(q.dtype).eps)
    scores = torch.cat((sure[..., None], q[..., 1:] * left[..., None]), -1)
    return scores.clamp(torch.finfo(q.dtype).tiny, 1.0).log()


def _frontier(rows: list[ScoredRow], level: int, device: torch.device) -> Frontier:
    tokens = torch.tensor([row.frontier_tokens for row in rows], device=device)
    return Frontier(tokens, torch.tensor([row.above for row in rows], device=device), level)

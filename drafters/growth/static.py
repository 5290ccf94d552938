"""Static: a fixed shape, whose nodes are the most likely tokens or drawn ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from drafters.errors import UserError
from drafters.frontier import Frontier
from drafters.growth.base import (
    DRAFT_MODES,
    FixedShape,
    Guesser,
    check_draft,
    check_size,
    drawable,
    target_ids,
)
from drafters.growth.ranks import Level, Paths, full, levels_of
from drafters.laws import Laws
from drafters.sampling import Coin, Warp
from drafters.tree import TokenTree

_BRANCHING = (3, 1, 1)


@dataclass(frozen=True)
class Static(FixedShape):
    """A fixed shape: every node of depth d - 1 has branching[d - 1] children, or a tree of ranks.

    Children are the most likely tokens, or drawn without replacement from the drafter's law. A
    tree's paths (ranks.py) say how many children each node has; `search` finds the best ones.
    """

    branching: tuple[int, ...] = _BRANCHING
    draft: str = "argmax"
    tree: Paths = ()

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.branching:
            raise UserError("branching is empty: give children per depth, such as 3.2.1")
        for value in self.branching:
            check_size(value, "branching")
        levels = (prod(self.branching[:depth]) for depth in range(1, len(self.branching) + 1))
        check_size(sum(levels), "the number of the tree's nodes")
        if self.tree and self.branching != _BRANCHING:
            raise UserError("branching and tree both name a shape: give one of them")
        check_draft(self.draft, DRAFT_MODES, "static")
        levels_of(self.tree or ((0,),))  # refuses paths that are no tree

    @cached_property
    def shape(self) -> list[Level]:
        """Return the levels."""
        return levels_of(self.tree or full(self.branching))

    @property
    def depth(self) -> int:
        """Return the number of levels."""
        return len(self.shape)

    @property
    def nodes(self) -> int:
        """Return the number of drafted nodes."""
        return sum(len(level.rank) for level in self.shape)

    @property
    def expanded(self) -> int:
        """Return the largest number of nodes that are expanded a level."""
        return max(1, *(len(level.expanded) for level in self.shape))

    @property
    def levels(self) -> int:
        """Return the depth: every round is worth drafting for."""
        return self.depth

    @property
    def cells(self) -> int:
        """Return the number of drafted nodes."""
        return self.nodes

    def parents(self) -> Tensor:
        """Return the shape's parents [N+1], level by level."""
        parent, above = [-1], [0]
        for level in self.shape:
            first = len(parent)
            parent += [above[place] for place in level.above]
            above = [first + place for place in level.expanded]
        return torch.tensor(parent)

    def grow(
        self, roots: Sequence[int], guesser: Guesser, warp: Warp, coins: Sequence[Coin]
    ) -> list[TokenTree]:
        """Grow one tree of the shape a row."""
        sampled = self.draft == "sampled" and not warp.greedy
        logits = guesser.root_logits()[:, None]
        columns: list[Tensor] = [torch.tensor(roots, device=logits.device)[:, None]]
        laws: list[Tensor] = []
        for depth, level in enumerate(self.shape, start=1):
            width = max(level.rank) + 1
            if width > logits.shape[-1]:
                raise UserError(
                    f"branching is {width} at depth {depth} and the draft vocabulary has "
                    f"{logits.shape[-1]} ids: give that or less"
                )
            above, rank = torch.tensor((level.above, level.rank), device=logits.device)
            nodes = above * width + rank
            if sampled:
                probs = drawable(warp, logits).probs
                choice = torch.stack(
                    [coin.draw_distinct(probs[i], width) for i, coin in enumerate(coins)]
                )
                laws.append(_shrinking(probs, choice)[:, nodes])
            else:
                choice = logits.topk(width).indices
            tokens = target_ids(choice, guesser.ids).flatten(1)[:, nodes]
            columns.append(tokens)
            if depth < self.depth:
                kept = list(level.expanded)
                frontier = Frontier(tokens[:, kept], above[kept].expand(len(roots), -1), depth)
                logits = guesser.step(frontier)
        tokens, parent = torch.cat(columns, 1).cpu(), self.parents()
        if not sampled:
            return [TokenTree(row, parent) for row in tokens]
        drawn, index = torch.cat(laws, 1), torch.arange(self.nodes)
        return [
            _without_impossible(TokenTree(row, parent, Laws(drawn[i], guesser.ids, index)))
            for i, row in enumerate(tokens)
        ]


def _shrinking(probs: Tensor, choice: Tensor) -> Tensor:
    """Return the law of each drawn sibling [R, F * width, K]: elder siblings' mass removed."""
    laws: list[Tensor] = []
    current = probs.clone()
    for place in range(choice.shape[-1]):
        total = current.sum(-1, keepdim=True)
        laws.append(current / total.clamp_min(torch.finfo(current.dtype).tiny))
        current = current.scatter(-1, choice[..., place : place + 1], 0.0)
    return torch.stack(laws, 2).flatten(1, 2)


def _without_impossible(tree: TokenTree) -> TokenTree:
    """Drop nodes drawn where no mass was left, with all below: such draws do not exist.

    This depends on the law's support and the elder siblings, never on the token itself.
    """
    laws = tree.laws
    assert laws is not None
    alive, there = [0], {0}
    for node, parent in enumerate(tree.parent_list[1:], start=1):
        if parent in there and bool(laws.probs[laws.of_list[node - 1]].sum() > 0):
            there.add(node)
            alive.append(node)
    return tree.keep(alive)

"""Static: a fixed shape of siblings per depth, the most likely ones or drawn ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from drafters.errors import UserError
from drafters.frontier import Frontier
from drafters.growth.base import (
    DRAFT_MODES,
    FixedShape,
    Guesser,
    check_at_least,
    check_draft,
    drawable,
    target_ids,
)
from drafters.laws import Laws
from drafters.sampling import Coin, Warp
from drafters.tree import TokenTree


@dataclass(frozen=True)
class Static(FixedShape):
    """A fixed shape: every node of depth d - 1 has branching[d - 1] children.

    Children are the most likely tokens, or drawn without replacement from the drafter's law.
    """

    branching: tuple[int, ...] = (3, 1, 1)
    draft: str = "argmax"

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.branching:
            raise UserError("branching is empty: give children per depth, such as 3.2.1")
        for value in self.branching:
            check_at_least(value, 1, "branching")
        check_draft(self.draft, DRAFT_MODES, "static")

    @property
    def depth(self) -> int:
        """Return the number of levels."""
        return len(self.branching)

    @property
    def nodes(self) -> int:
        """Return the number of drafted nodes."""
        total, level = 0, 1
        for width in self.branching:
            level *= width
            total += level
        return total

    @property
    def expanded(self) -> int:
        """Return the nodes of the last level but one, the widest that is expanded."""
        return prod(self.branching[:-1])

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
        parent, level = [-1], [0]
        for width in self.branching:
            above = [node for node in level for _ in range(width)]
            level = list(range(len(parent), len(parent) + len(above)))
            parent += above
        return torch.tensor(parent)

    def grow(
        self, roots: Sequence[int], guesser: Guesser, warp: Warp, coins: Sequence[Coin]
    ) -> list[TokenTree]:
        """Grow one tree of the shape a row."""
        sampled = self.draft == "sampled" and not warp.greedy
        logits = guesser.root_logits()[:, None]
        columns: list[Tensor] = [torch.tensor(roots, device=logits.device)[:, None]]
        laws: list[Tensor] = []
        of: list[int] = []
        for depth, width in enumerate(self.branching, start=1):
            if width > logits.shape[-1]:
                raise UserError(
                    f"branching is {width} at depth {depth} and the draft vocabulary has "
                    f"{logits.shape[-1]} ids: give that or less"
                )
            if sampled:
                probs = drawable(warp, logits.flatten(0, 1)).probs.view(logits.shape)
                choice = torch.stack(
                    [coin.draw_distinct(probs[i], width) for i, coin in enumerate(coins)]
                )
                first = sum(x.shape[1] for x in laws)
                siblings = _shrinking(probs, choice)
                laws.append(siblings)
                of += range(first, first + siblings.shape[1])
            else:
                choice = logits.topk(width, dim=-1).indices
            tokens = target_ids(choice, guesser.ids)
            columns.append(tokens.flatten(1))
            if depth < self.depth:
                above = torch.arange(tokens.shape[1], device=tokens.device)
                above = above.repeat_interleave(width)
                frontier = Frontier(columns[-1], above.expand(len(roots), -1), depth)
                logits = guesser.step(frontier)
        tokens, parent = torch.cat(columns, 1).cpu(), self.parents()
        if not sampled:
            return [TokenTree(row, parent) for row in tokens]
        drawn, index = torch.cat(laws, 1), torch.tensor(of)
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

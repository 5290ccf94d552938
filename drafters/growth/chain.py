"""Chain: gamma tokens without branches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
from drafters.laws import Laws
from drafters.sampling import Coin, Warp
from drafters.tree import TokenTree, chain_parents


@dataclass(frozen=True)
class Chain(FixedShape):
    """gamma tokens without branches: argmax, or drawn from the drafter's warped law."""

    gamma: int = 4
    draft: str = "argmax"

    def __post_init__(self) -> None:
        """Check the values."""
        check_size(self.gamma, "gamma")
        check_draft(self.draft, DRAFT_MODES, "chain")

    @property
    def depth(self) -> int:
        """Return gamma."""
        return self.gamma

    @property
    def nodes(self) -> int:
        """Return gamma."""
        return self.gamma

    @property
    def expanded(self) -> int:
        """Return 1: a chain has no branches."""
        return 1

    @property
    def levels(self) -> int:
        """Return the depth: every round is worth drafting for."""
        return self.depth

    @property
    def cells(self) -> int:
        """Return gamma."""
        return self.gamma

    def grow(
        self, roots: Sequence[int], guesser: Guesser, warp: Warp, coins: Sequence[Coin]
    ) -> list[TokenTree]:
        """Grow one chain a row."""
        sampled = self.draft == "sampled" and not warp.greedy
        logits = guesser.root_logits()
        device = logits.device
        straight = torch.zeros(len(roots), 1, dtype=torch.int64, device=device)
        columns: list[Tensor] = [torch.tensor(roots, device=device)]
        laws: list[Tensor] = []
        for depth in range(1, self.gamma + 1):
            if sampled:
                law = drawable(warp, logits, guesser.ids)
                laws.append(law.probs)
                drawn = [coin.draw(law.law(i)) for i, coin in enumerate(coins)]
                columns.append(torch.tensor(drawn, device=device))
            else:
                columns.append(target_ids(logits.max(1).indices, guesser.ids))
            if depth < self.gamma:
                frontier = Frontier(columns[-1][:, None], straight, depth)
                logits = guesser.step(frontier)[:, 0]
        tokens = torch.stack(columns, 1).cpu()
        parent, of = chain_parents(self.gamma + 1), torch.arange(self.gamma)
        if not sampled:
            return [TokenTree(row, parent) for row in tokens]
        probs = torch.stack(laws, 1)
        return [
            TokenTree(row, parent, Laws(probs[i], guesser.ids, of)) for i, row in enumerate(tokens)
        ]

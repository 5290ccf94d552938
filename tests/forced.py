"""Training and decoding side by side: predictions by slot, and a growth that feeds given tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.base import Prediction
from drafters.frontier import Frontier
from drafters.growth import Guesser
from drafters.sampling import Coin, Warp
from drafters.tree import TokenTree, chain_parents


def by_slot(predictions: Sequence[Prediction]) -> dict[tuple[int, int], Tensor]:
    """Return {(step, flat slot): logits}, once the positions are checked."""
    found = {}
    for step, prediction in enumerate(predictions):
        assert prediction.depth == step + 1
        assert torch.equal(prediction.positions, prediction.group + step + 1)
        assert bool((prediction.positions[1:] > prediction.positions[:-1]).all())
        logits = prediction.logits(slice(0, len(prediction.group))).detach()
        for slot, row in zip(prediction.group.tolist(), logits, strict=True):
            found[step, slot] = row
    return found


class Forced:
    """A growth that feeds given tokens to every row and keeps the logits it is told."""

    def __init__(self, tokens: Sequence[Sequence[int]]) -> None:
        self.tokens = torch.tensor(tokens)
        self.depth = self.cells = self.nodes = self.tokens.shape[1]
        self.draft = "argmax"
        self.logits: list[Tensor] = []

    def grow(
        self, roots: Sequence[int], guesser: Guesser, warp: Warp, coins: Sequence[Coin]
    ) -> list[TokenTree]:
        self.logits = [guesser.root_logits()]
        parent = torch.zeros(len(roots), 1, dtype=torch.int64)
        for depth, column in enumerate(self.tokens.unbind(1), start=1):
            self.logits.append(guesser.step(Frontier(column[:, None], parent, depth))[:, 0])
        return [TokenTree(torch.tensor([root]), chain_parents(1)) for root in roots]

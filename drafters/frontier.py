"""Frontier: the nodes of a tree that are expanded together, and their cells in a drafter's cache.

A growth policy hands frontiers to a session's `step`; a session with a cache of its own asks
FrontierCells where to write them and which ancestors they see.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.cache import Block, KVCache, Placement


@dataclass(frozen=True)
class Frontier:
    """Nodes of one depth, for all drafting rows at once.

    Args:
        tokens: [R, F] int64 token ids of the target's vocabulary.
        parent: [R, F] int64 index into the frontier before (0 at depth 1: the root).
        depth: of these nodes; 1 is the first drafted token.
    """

    tokens: Tensor
    parent: Tensor
    depth: int


class FrontierCells:
    """Places one round's frontiers one after the other behind the committed part of a cache.

    Args:
        cache: the drafter's own cache; its lengths stay as they are.
        rows: the cache rows that draft, ascending.
    """

    def __init__(self, cache: KVCache, rows: Sequence[int]) -> None:
        """Start a round with nothing guessed."""
        self.cache, self.rows = cache, rows
        self.seen = torch.zeros(len(rows), 1, 0, dtype=torch.bool)

    def place(self, frontier: Frontier) -> Placement:
        """Assign cells to a frontier; each node sees the committed part, its ancestors, itself.

        The node at depth d lies d - 1 positions behind the first column after the committed part.
        """
        count, size = frontier.tokens.shape
        column = self.seen.shape[-1]
        index = frontier.parent[..., None].expand(-1, -1, column)
        seen = self.seen.gather(1, index) if column else self.seen.expand(count, size, 0)
        itself = torch.eye(size, dtype=torch.bool)
        offset = torch.full((size,), frontier.depth - 1)
        blocks: list[Block | None] = [None] * self.cache.rows
        for place, row in enumerate(self.rows):
            blocks[row] = Block(offset, itself, column, seen[place] if column else None)
        self.seen = torch.cat((seen, itself.expand(count, size, size)), -1)
        return self.cache.place(blocks)

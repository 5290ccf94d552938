"""Frontier: the nodes of a tree that are expanded together, and their cells in a drafter's cache.

A growth policy hands frontiers to a session's `step`; a session with a cache of its own asks
FrontierCells where to write them and which ancestors they see.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.cache import KVCache
from drafters.errors import UserError
from drafters.placement import Placement


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

    KVCache.place would do, row by row. All rows grow in lockstep here, so that their cells are one
    sum and a chain in one row needs no mask: a drafter's step is short enough for that to count.

    Args:
        cache: the drafter's own cache; its lengths stay as they are.
        rows: the cache rows that draft, ascending.
    """

    def __init__(self, cache: KVCache, rows: Sequence[int]) -> None:
        """Start a round with nothing guessed."""
        self.cache, self.rows = cache, rows
        device = cache.store.device
        index = torch.tensor(rows)
        lengths = cache.lengths[index]
        self.longest = int(lengths.max())
        self.lengths = lengths.to(device)[:, None]
        self.first = rows[0] * cache.capacity + int(lengths[0])
        several = len(rows) > 1  # one row's cells are a slice
        self.cells = (index * cache.capacity + lengths).to(device)[:, None] if several else None
        self.column = cache.masks.columns
        gaps = len(rows) <= rows[-1] - rows[0]
        self.places = (index - rows[0]).to(device) if gaps else None
        self.depths: list[int] = []  # of every guessed column, minus one
        self.seen: Tensor | None = None  # [R, F, columns] bool; None: one straight chain so far

    def place(self, frontier: Frontier) -> Placement:
        """Assign cells to a frontier; each node sees the committed part, its ancestors, itself.

        The node at depth d lies d - 1 positions behind the first column after the committed part.

        Raises:
            UserError: if a row would outgrow the capacity.
        """
        count, size = frontier.tokens.shape
        start, stop = len(self.depths), len(self.depths) + size
        span = self.longest + stop
        if span > self.cache.capacity:
            raise UserError(
                f"a row needs {span} tokens but the drafter's cache holds {self.cache.capacity}: "
                "ask for fewer new tokens or a larger capacity"
            )
        if size > 1 or self.seen is not None:
            self.seen = self._extended(frontier, start)
        self.depths += [frontier.depth - 1] * size
        position = (self.lengths + (frontier.depth - 1)).expand(count, size)
        hidden, guessed = self._visibility(span)
        counts = [0] * self.cache.rows
        for row in self.rows:
            counts[row] = size
        cells: Tensor | slice = slice(self.first + start, self.first + stop)
        if self.cells is not None:
            cells = (self.cells + self.column[start:stop]).flatten()
        grid = None
        if self.places is not None:
            grid = (self.places[:, None] * size + self.column[:size]).flatten()
        return Placement(
            rows=slice(self.rows[0], self.rows[-1] + 1),
            cells=cells,
            positions=position.flatten(),
            grid=grid,
            width=size,
            span=span,
            hidden=None if hidden is None else self._spread(hidden),
            query_position=self._spread(position),
            counts=counts,
            guessed=guessed,
            chain=self.cache.masks if self._straight else None,
        )

    @property
    def _straight(self) -> bool:
        """Tell whether one row's chain is all there is."""
        return self.cells is None and self.seen is None

    def _extended(self, frontier: Frontier, start: int) -> Tensor:
        """Return which guessed columns each node of the frontier sees [R, F, start + F]."""
        count, size = frontier.tokens.shape
        device = self.column.device
        seen = self.seen
        if seen is None:
            seen = torch.ones(count, 1, start, dtype=torch.bool, device=device)
        seen = seen.gather(1, frontier.parent[..., None].expand(-1, -1, start))
        itself = torch.eye(size, dtype=torch.bool, device=device).expand(count, size, size)
        return torch.cat((seen, itself), -1)

    def _visibility(self, span: int) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """Return what the newest nodes may not see [R, F, span], and the guesses' positions.

        Those are columns and positions, both [R, guesses]; None where they are the same.
        """
        column, stop = self.column[:span], len(self.depths)
        if self.seen is None:
            ends = self.lengths + stop
            return None if self._straight else (column >= ends)[:, None], None
        guessed = self.lengths + self.column[:stop]
        depths = torch.tensor(self.depths, device=column.device)
        size = self.seen.shape[1]
        hidden = (column >= self.lengths)[:, None].repeat(1, size, 1)
        hidden.scatter_(2, guessed[:, None].expand(-1, size, -1), ~self.seen)
        positions = self.lengths + depths
        return hidden, (self._spread(guessed), self._spread(positions))

    def _spread(self, x: Tensor) -> Tensor:
        """Make room for the rows of the range that do not draft; what they see is never read."""
        if self.places is None:
            return x
        full = x.new_zeros(self.rows[-1] + 1 - self.rows[0], *x.shape[1:])
        full[self.places] = x
        return full

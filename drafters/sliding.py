"""SlidingCache: the first and the latest tokens of another cache, with room for guesses behind.

What the other cache commits is copied as it comes, the latest over the oldest in a ring, so a round
copies a few tokens and attention reads a fixed number of columns, however long the text is. Keys
were turned by their positions, so a column's place says nothing: positions are kept beside.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from drafters.cache import KVCache
from drafters.frontier import Frontier, FrontierCells
from drafters.placement import Placement


class SlidingCache:
    """A window on another cache.

    Args:
        source: whose committed tokens are read; never written to.
        sinks: tokens kept from the start of every row.
        window: tokens kept from its end.
        guesses: columns for guesses.
    """

    def __init__(self, source: KVCache, sinks: int, window: int, guesses: int) -> None:
        """Allocate the columns."""
        self.source, self.sinks, self.window = source, sinks, window
        self.size = sinks + window
        self.cache = KVCache(
            source.rows,
            self.size + guesses,
            layers=len(source.store),
            heads=source.heads,
            head_dim=source.head_dim,
            dtype=source.store.dtype,
            device=source.store.device,
        )
        self.positions = torch.arange(self.cache.capacity).repeat(source.rows, 1)  # of columns
        self.shift = torch.zeros(source.rows, dtype=torch.int64)  # of guesses: position - column
        self._copied = [0] * source.rows

    def forget(self, row: int) -> None:
        """Start a row afresh."""
        self._copied[row] = 0

    def refresh(self, rows: Sequence[int]) -> None:
        """Copy what these rows committed since they were last refreshed."""
        for row in rows:
            length = int(self.source.lengths[row])
            new = torch.arange(self._copied[row], length)
            new = new[(new < self.sinks) | (new >= length - self.window)]
            wrapped = self.sinks + (new - self.sinks) % self.window
            columns = torch.where(new < self.sinks, new, wrapped)
            device = self.source.store.device
            taken = self.source.store.index_select(2, (row * self.source.capacity + new).to(device))
            cells = (row * self.cache.capacity + columns).to(device)
            self.cache.store.index_copy_(2, cells, taken)
            self.positions[row, columns] = new
            self.cache.lengths[row] = min(length, self.size)
            self.shift[row] = length - min(length, self.size)
            self._copied[row] = length

    def cells(self, rows: Sequence[int]) -> "SlidingCells":
        """Return what places one round's frontiers of these rows."""
        return SlidingCells(self, rows)


class SlidingCells:
    """Places frontiers behind the window, at the positions that they have in the text.

    Args:
        view: refreshed for these rows.
        rows: that draft, ascending.
    """

    def __init__(self, view: SlidingCache, rows: Sequence[int]) -> None:
        """Start a round with nothing guessed."""
        self.view, self.rows = view, list(rows)
        self.inner = FrontierCells(view.cache, rows)

    def place(self, frontier: Frontier) -> Placement:
        """Assign cells to a frontier; depth 1 is the first token that is not committed."""
        placed, view = self.inner.place(frontier), self.view
        device = placed.positions.device
        shift = view.shift[self.rows].to(device).repeat_interleave(frontier.tokens.shape[1])
        spread = view.shift[placed.rows, None].to(device)
        committed = torch.arange(placed.span) < view.cache.lengths[placed.rows, None]
        known = view.positions[placed.rows, : placed.span].to(device)
        return replace(
            placed,
            positions=placed.positions + shift,
            query_position=placed.query_position + spread,
            moved=torch.where(committed.to(device), known, placed.key_position + spread),
            chain=None,
        )

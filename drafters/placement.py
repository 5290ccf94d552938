"""Placement: where the new tokens of a forward go in a cache, and who sees whom.

Owns cells, positions and masks of one forward; cache.py stores and reads by them. Committed tokens
of row b fill columns 0..lengths[b]-1, new ones the columns behind; column = position for every
committed token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.masks import ChainMasks, additive
from drafters.structs import Reads, reads
from drafters.tree import causal


@dataclass(frozen=True)
class Block:
    """The new tokens of one row: their offsets from the root and who sees whom.

    Args:
        offset: [n] int64; position minus the row's length (0 for the root, depth for a node).
        visible: [n, n] bool; row i marks the new tokens that token i sees, itself included.
    """

    offset: Tensor
    visible: Tensor


def causal_block(length: int) -> Block:
    """Return the block of a row's next `length` tokens, each seeing those before it."""
    return Block(torch.arange(length), causal(length))


@dataclass
class Placement:
    """Where M new tokens go and what they may read.

    Args:
        rows: the contiguous range of cache rows that take part.
        cells: [M] int64, flat cell (row * capacity + column) of each token; a slice where they
            are one run, as one row's are.
        positions: [M] int64 context positions.
        grid: [M] int64 place of each token in the padded [rows, width] grid; None if it fills it.
        width: the widest row's number of new tokens.
        span: columns read, 0..span-1.
        hidden: [rows, width, span] bool, True where a token may not look; None: all see all.
        query_position: [rows, width]; for sliding windows and models that are told positions.
        guessed: columns and positions, both [rows, n], of what is not committed; None where every
            column is its position. Column `span` is nobody's.
        counts: number of new tokens of each row of the cache (0 for rows that do not take part).
        chain: gives the masks of a single row's chain, in place of hidden.
        moved: positions [rows, span] of all columns, where committed ones are not their columns.
        blind: columns before this one are hidden from every token.
        starts: [M] int64, the first cell of each token's row, where every row has one new token:
            what such a token sees is one run of cells.
    """

    rows: slice
    cells: Tensor | slice
    positions: Tensor
    grid: Tensor | None
    width: int
    span: int
    hidden: Tensor | None
    query_position: Tensor
    counts: list[int]
    guessed: tuple[Tensor, Tensor] | None = None
    chain: ChainMasks | None = None
    moved: Tensor | None = None
    blind: int = 0
    starts: Tensor | None = None
    _masks: dict[tuple[int | None, int, torch.dtype], Tensor | None] = field(default_factory=dict)
    _reads: dict[tuple[int | None, int, torch.dtype], Reads] = field(default_factory=dict)

    @cached_property
    def key_position(self) -> Tensor:
        """Return every column's position [rows, span]; only sliding windows ask."""
        if self.moved is not None:
            return self.moved
        count = self.rows.stop - self.rows.start
        columns = torch.arange(self.span + 1, device=self.positions.device).expand(count, -1)
        columns = columns if self.guessed is None else columns.scatter(1, *self.guessed)
        return columns[:, :-1]

    def mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask [rows, 1, groups * width, span], or None if all is visible.

        Args:
            window: a layer's sliding window in positions, None for full attention.
            groups: query heads that share one key head, folded into the query axis.
            dtype: the attention's dtype.
        """
        key = (window, groups, dtype)
        if key not in self._masks:
            self._masks[key] = self._mask(window, groups, dtype)
        return self._masks[key]

    def runs(self, window: int | None) -> tuple[Tensor, Tensor] | None:
        """Return the first cell that each token sees and how many, both [M]; None without starts.

        Args:
            window: as for `mask`.
        """
        if self.starts is None or (window is not None and self.moved is not None):
            return None
        cells = self.cell_list
        first = self.starts + self.blind
        if window is not None:
            near = self.starts + self.positions - (window - 1)
            first = torch.minimum(torch.maximum(first, near), cells)  # its own it always sees
        return first, cells + 1 - first

    def reads(self, window: int | None, groups: int, dtype: torch.dtype, capacity: int) -> Reads:
        """Return what the kernels read: the run that each token sees, else a mask over its row's.

        Args:
            window: as for `mask`.
            groups: as for `mask`.
            dtype: as for `mask`.
            capacity: cells of a row.
        """
        key = (window, groups, dtype)
        if key not in self._reads:
            runs = self.runs(window)
            self._reads[key] = (
                self._row_reads(window, groups, dtype, capacity)
                if runs is None
                else reads(1, runs, None, None)
            )
        return self._reads[key]

    def _row_reads(
        self, window: int | None, groups: int, dtype: torch.dtype, capacity: int
    ) -> Reads:
        rows = torch.arange(self.rows.start, self.rows.stop)
        tokens = None
        if self.grid is not None:
            tokens = torch.full((len(rows) * self.width,), -1)
            tokens[self.grid] = torch.arange(len(self.grid))
        runs = rows * capacity, torch.full_like(rows, self.span)
        return reads(self.width, runs, self.mask(window, groups, dtype), tokens)

    @cached_property
    def cell_list(self) -> Tensor:
        """Return the cells as a tensor [M]."""
        cells = self.cells
        if not isinstance(cells, slice):
            return cells
        return torch.arange(cells.start, cells.stop, device=self.positions.device)

    def blind_before(self, column: int) -> "Placement":
        """Return the same placement with the columns before this one hidden from every token."""
        return replace(self, blind=column, _masks={}, _reads={})

    def unmasked(self) -> "Placement":
        """Return a single row's chain as a block whose tokens see each other and all before."""
        assert self.chain is not None
        return replace(self, chain=None, _masks={}, _reads={})

    def _mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        mask = self._own_mask(window, groups, dtype)
        if not self.blind:
            return mask
        if mask is None:
            count = self.rows.stop - self.rows.start
            mask = torch.zeros(count, 1, groups * self.width, self.span, dtype=dtype)
            mask = mask.to(self.positions.device)
        early = torch.arange(self.span, device=mask.device) < self.blind
        return mask.masked_fill(early, torch.finfo(dtype).min)

    def _own_mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        if self.chain is not None:
            return self.chain.mask(self.width, self.span, window, groups, dtype)
        hidden = self.hidden
        if window is not None and (self.moved is not None or self.span > window):
            far = self.query_position[:, :, None] - self.key_position[:, None, :] >= window
            hidden = far if hidden is None else hidden | far
        return None if hidden is None else additive(hidden, groups, dtype)

    def to_grid(self, flat: Tensor) -> Tensor:
        """Lay [M, ...] out as [rows, width, ...]; the padding repeats nothing, it is zero."""
        count = self.rows.stop - self.rows.start
        if self.grid is None:
            return flat.view(count, self.width, *flat.shape[1:])
        padded = flat.new_zeros(count * self.width, *flat.shape[1:])
        padded[self.grid] = flat
        return padded.view(count, self.width, *flat.shape[1:])

    def from_grid(self, grid: Tensor) -> Tensor:
        """Take the M real entries out of [rows, width, ...]."""
        flat = grid.reshape(-1, *grid.shape[2:])
        return flat if self.grid is None else flat[self.grid]


def place(
    blocks: Sequence[Block | None], lengths: Tensor, span: int, masks: ChainMasks
) -> Placement:
    """Give cells, positions and masks to new tokens, one block a row; None leaves a row out.

    Args:
        blocks: one of them at least is not None.
        lengths: [B] committed tokens of every row of the cache.
        span: columns that the longest row has with its new tokens.
        masks: of the cache.
    """
    active = [row for row, block in enumerate(blocks) if block is not None]
    counts = [0 if block is None else len(block.offset) for block in blocks]
    first = blocks[active[0]]
    if len(active) == 1 and first is not None and first.visible is causal(len(first.offset)):
        return _place_chain(active[0], span, counts, masks)
    rows = slice(active[0], active[-1] + 1)
    return _place_rows(blocks[rows], lengths[rows], rows, span, masks, counts)


def _place_chain(row: int, span: int, counts: list[int], masks: ChainMasks) -> Placement:
    """Build nothing: positions and masks of one row's chain are views."""
    width, start = counts[row], row * masks.capacity
    positions = masks.columns[span - width : span]
    return Placement(
        rows=slice(row, row + 1),
        cells=slice(start + span - width, start + span),
        positions=positions,
        grid=None,
        width=width,
        span=span,
        hidden=None,
        query_position=positions[None],
        counts=counts,
        chain=masks,
        starts=torch.tensor([start], device=masks.device) if width == 1 else None,
    )


def _place_rows(
    blocks: Sequence[Block | None],
    lengths: Tensor,
    rows: slice,
    span: int,
    masks: ChainMasks,
    counts: list[int],
) -> Placement:
    """Build cells, positions and masks for all rows of the range at once."""
    device, width = masks.device, max(counts)
    real = torch.tensor(counts[rows])[:, None] > torch.arange(width)
    offset = torch.zeros(len(real), width, dtype=torch.int64)
    offset[real] = torch.cat([block.offset for block in blocks if block is not None])
    position = lengths[:, None] + offset
    columns = lengths[:, None] + torch.arange(width)
    grid = None if bool(real.all()) else real.flatten().nonzero().flatten()
    positions = position.view(-1) if grid is None else position.view(-1)[grid]
    hidden = _hidden(blocks, lengths, columns, span)
    query_position = position.to(device)
    first = torch.arange(rows.start, rows.stop) * masks.capacity
    return Placement(
        rows=rows,
        cells=_cells(columns, first, grid, device),
        positions=positions.to(device),
        grid=None if grid is None else grid.to(device),
        width=width,
        span=span,
        hidden=None if hidden is None else hidden.to(device),
        query_position=query_position,
        counts=counts,
        guessed=(columns.clamp_max(span).to(device), query_position),
        starts=(first if grid is None else first[grid]).to(device) if width == 1 else None,
    )


def _cells(
    columns: Tensor, first: Tensor, grid: Tensor | None, device: torch.device
) -> Tensor | slice:
    """Return the flat cells of columns [R, n] of rows that begin at `first`: a run for one row."""
    cells = (first[:, None] + columns).flatten()
    if len(first) == 1:
        return slice(int(cells[0]), int(cells[0]) + len(cells))
    return (cells if grid is None else cells[grid]).to(device)


def _hidden(
    blocks: Sequence[Block | None], lengths: Tensor, columns: Tensor, span: int
) -> Tensor | None:
    """Return what each token may not see [R, n, span]; columns [R, n] of the new tokens."""
    width = columns.shape[1]
    whole = all(block is not None for block in blocks)
    if width == 1 and whole and bool((lengths == span - 1).all()):
        return None
    hidden = (torch.arange(span + 1) >= lengths[:, None])[:, None, :].repeat(1, width, 1)
    # what pads a row lies behind its columns; a row that takes no part only has to fit
    some = next(block for block in blocks if block is not None)
    taken = [block or some for block in blocks]
    visible = [F.pad(block.visible, (0, width - len(block.offset)) * 2) for block in taken]
    own = columns.clamp_max(span)[:, None].expand(-1, width, -1)
    return hidden.scatter_(2, own, ~torch.stack(visible))[..., :-1]

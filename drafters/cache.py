"""KVCache: keys and values of many rows, each with its own length, in one preallocated tensor.

Owns where new tokens are written (Placement), who sees whom, and the attention that reads the
cache. Committed tokens of row b fill columns 0..lengths[b]-1; what lies beyond is stale and masked,
the next write starts at column lengths[b]. Column = position for every committed token, so moving
an accepted path down to its place keeps its rotary phase right (it was applied by depth).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.errors import UserError


@dataclass(frozen=True)
class Block:
    """The new tokens of one row: their offsets from the root and who sees whom.

    Args:
        offset: [n] int64; position minus the row's length (0 for the root, depth for a node).
        visible: [n, n] bool; row i marks the new tokens that token i sees, itself included.
    """

    offset: Tensor
    visible: Tensor


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
        query_position, key_position: [rows, width], [rows, span]; only for sliding windows.
        counts: number of new tokens of each row of the cache (0 for rows that do not take part).
        moved: whether columns of committed tokens are not their positions.
    """

    rows: slice
    cells: Tensor | slice
    positions: Tensor
    grid: Tensor | None
    width: int
    span: int
    hidden: Tensor | None
    query_position: Tensor
    key_position: Tensor
    counts: list[int]
    moved: bool = False
    _masks: dict[tuple[int | None, int, torch.dtype], Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask [rows, 1, groups * width, span], or None if all is visible.

        Args:
            window: a layer's sliding window in positions, None for full attention.
            groups: query heads that share one key head, folded into the query axis.
            dtype: the attention's dtype.
        """
        key = (window, groups, dtype)
        if key not in self._masks:
            hidden = self.hidden
            if window is not None and (self.moved or self.span > window):
                far = self.query_position[:, :, None] - self.key_position[:, None, :] >= window
                hidden = far if hidden is None else hidden | far
            if hidden is None:
                self._masks[key] = None
            else:
                mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
                mask.masked_fill_(hidden, torch.finfo(dtype).min)
                self._masks[key] = mask.repeat(1, groups, 1)[:, None]
        return self._masks[key]

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


class KVCache:
    """Keys and values of `rows` sequences in `layers` layers.

    Args:
        rows: batch size B.
        capacity: columns a row can hold, guesses included.
        layers: number of attention layers.
        heads: key/value heads.
        head_dim: width of one head.
        dtype, device: of the stored states.

    Raises:
        UserError: if the memory cannot be had; says how much it takes.
    """

    def __init__(
        self,
        rows: int,
        capacity: int,
        *,
        layers: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate; untouched pages cost nothing, and zeros keep masked cells finite."""
        self.rows, self.capacity = rows, capacity
        self.heads, self.head_dim = heads, head_dim
        shape = (layers, 2, rows * capacity, heads, head_dim)
        size = torch.Size(shape).numel() * dtype.itemsize
        check_memory(size, torch.device(device), f"a cache of {rows} rows x {capacity} tokens")
        self.store = torch.zeros(shape, dtype=dtype, device=device)
        # by layer: cells to write, and [rows, heads, capacity, head_dim] to read
        self._cells = [layer.unbind(0) for layer in self.store]
        grid = self.store.view(layers, 2, rows, capacity, heads, head_dim).transpose(3, 4)
        self._grids = [layer.unbind(0) for layer in grid]
        self.lengths = torch.zeros(rows, dtype=torch.int64)

    def place(self, blocks: Sequence[Block | None]) -> Placement:
        """Assign cells and masks to new tokens, one block a row; None leaves a row out.

        Nothing is committed: the same columns are assigned again until `keep` or `advance`.

        Raises:
            UserError: if a row would outgrow the capacity.
        """
        active = [row for row, block in enumerate(blocks) if block is not None]
        rows = slice(active[0], active[-1] + 1)
        counts = [0 if block is None else len(block.offset) for block in blocks]
        lengths = self.lengths.tolist()
        ends = [lengths[r] + counts[r] for r, b in enumerate(blocks) if b is not None]
        if max(ends) > self.capacity:
            raise UserError(
                f"a row needs {max(ends)} tokens but the cache holds {self.capacity}: "
                "ask for fewer new tokens or a larger capacity"
            )
        return _placement(self, blocks, rows, counts, max(ends))

    def write(self, layer: int, keys: Tensor, values: Tensor, placement: Placement) -> None:
        """Store keys and values [M, heads, head_dim] in their cells."""
        for cells, new in zip(self._cells[layer], (keys, values), strict=True):
            if isinstance(placement.cells, slice):
                cells[placement.cells] = new
            else:
                cells.index_copy_(0, placement.cells, new)

    def read(self, layer: int, placement: Placement) -> tuple[Tensor, Tensor]:
        """Return views of keys and values [rows, heads, span, head_dim]."""
        keys, values = self._grids[layer]
        read = (placement.rows, slice(None), slice(placement.span))
        return keys[read], values[read]

    def attend(
        self,
        layer: int,
        query: Tensor,
        placement: Placement,
        *,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Let new tokens read what they may see of the cache (their own cells included).

        Query heads that share a key head are folded into the query axis: no key is repeated.
        The mask is explicit, so a block over a cached prefix is masked at its lower right.

        Args:
            layer: which layer's cells; the new keys and values must be written first.
            query: [M, query heads, head_dim].
            placement: of these M tokens.
            window: sliding window in positions.
            scale: of the scores; None: head_dim ** -0.5.

        Returns:
            [M, query heads * head_dim].
        """
        keys, values = self.read(layer, placement)
        grid = placement.to_grid(query)
        count, width, heads, dim = grid.shape
        groups = heads // self.heads
        mask = placement.mask(window, groups, query.dtype)
        folded = grid.unflatten(2, (self.heads, groups))
        if width == 1:
            folded = folded[:, 0]
        else:
            folded = folded.permute(0, 2, 3, 1, 4).reshape(count, self.heads, groups * width, dim)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
        if width > 1:
            out = out.view(count, self.heads, groups, width, dim).permute(0, 3, 1, 2, 4)
        return placement.from_grid(out.reshape(count, width, heads * dim))

    def keep(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Commit one path of the tokens placed last, root first; drop the others.

        Args:
            paths: per row the new tokens' indices, ascending; None leaves a row as it is.
        """
        source, target = [], []
        lengths = self.lengths.tolist()
        for row, path in enumerate(paths):
            if path is None:
                continue
            start = row * self.capacity + lengths[row]
            moved = [(node, column) for column, node in enumerate(path) if node != column]
            source += [start + node for node, _ in moved]
            target += [start + column for _, column in moved]
        self.advance([0 if path is None else len(path) for path in paths])
        if source:
            index = torch.tensor(source, device=self.store.device)
            place = torch.tensor(target, device=self.store.device)
            self.store.index_copy_(2, place, self.store.index_select(2, index))

    def advance(self, counts: Sequence[int]) -> None:
        """Commit the first counts[b] tokens placed last in each row."""
        self.lengths += torch.tensor(counts)

    def wipe(self, row: int) -> None:
        """Zero what lies beyond a row's committed tokens: masked cells must be finite."""
        start = row * self.capacity
        self.store[:, :, start + int(self.lengths[row]) : start + self.capacity] = 0

    def reset(self, row: int) -> None:
        """Empty a row for its next sequence."""
        self.lengths[row] = 0


def _placement(
    cache: KVCache,
    blocks: Sequence[Block | None],
    rows: slice,
    counts: list[int],
    span: int,
) -> Placement:
    """Build cells, positions and masks for all rows of the range at once."""
    device = cache.store.device
    width = max(counts)
    count = rows.stop - rows.start
    lengths = cache.lengths[rows]
    taken = blocks[rows]
    real = torch.tensor(counts[rows])[:, None] > torch.arange(width)
    offset = torch.zeros(count, width, dtype=torch.int64)
    offset[real] = torch.cat([block.offset for block in taken if block is not None])
    position = lengths[:, None] + offset
    columns = lengths[:, None] + torch.arange(width)
    full = bool(real.all())
    grid = None if full else real.view(-1).nonzero().squeeze(-1)
    positions = position.view(-1) if grid is None else position.view(-1)[grid]
    hidden, key_position = _visibility(taken, lengths, position, span)
    return Placement(
        rows=rows,
        cells=_cells(cache, rows, columns, grid),
        positions=positions.to(device),
        grid=None if grid is None else grid.to(device),
        width=width,
        span=span,
        hidden=None if hidden is None else hidden.to(device),
        query_position=position.to(device),
        key_position=key_position.to(device),
        counts=counts,
    )


def _cells(cache: KVCache, rows: slice, columns: Tensor, grid: Tensor | None) -> Tensor | slice:
    """Return the flat cells of columns [R, n]: one run for a single row."""
    if len(columns) == 1:
        start = rows.start * cache.capacity + int(columns[0, 0])
        return slice(start, start + columns.shape[1])
    first = torch.arange(rows.start, rows.stop)[:, None] * cache.capacity
    cells = (first + columns).view(-1)
    return (cells if grid is None else cells[grid]).to(cache.store.device)


def _visibility(
    blocks: Sequence[Block | None], lengths: Tensor, position: Tensor, span: int
) -> tuple[Tensor | None, Tensor]:
    """Return what each token may not see [R, n, span], and the position of every column."""
    width = position.shape[1]
    key_position = torch.arange(span).expand(len(blocks), span).clone()
    whole = all(b is not None for b in blocks)
    if width == 1 and whole and bool((lengths == span - 1).all()):
        return None, key_position
    hidden = (torch.arange(span) >= lengths[:, None])[:, None, :].repeat(1, width, 1)
    if all(b is None or len(b.offset) == width for b in blocks):
        # one scatter for all rows; a row that takes no part is never read, it only has to fit
        some = next(b for b in blocks if b is not None)
        visible = torch.stack([(some if b is None else b).visible for b in blocks])
        own = (lengths[:, None] + torch.arange(width)).clamp_max(span - 1)
        hidden.scatter_(2, own[:, None].expand(-1, width, -1), ~visible)
        return hidden, key_position.scatter_(1, own, position)
    for index, block in enumerate(blocks):
        if block is None:
            hidden[index, :, 0] = False
            continue
        n, start = len(block.offset), int(lengths[index])
        hidden[index, :n, start : start + n] = ~block.visible
        key_position[index, start : start + n] = position[index, :n]
        hidden[index, n:, 0] = False
    return hidden, key_position


def check_memory(size: int, device: torch.device, what: str) -> None:
    """Raise UserError if `size` bytes are not free on the device; `what` names the need."""
    free = _free_memory(device)
    if free is not None and size > free:
        raise UserError(
            f"{what} needs {size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free: "
            "use fewer rows or fewer tokens"
        )


def _free_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    table = dict(line.split(":", 1) for line in lines)
    return int(table["MemAvailable"].split()[0]) * 1024

"""KVCache: keys and values of many rows, each with its own length, in one preallocated tensor.

Owns the store, the attention that reads it and what a kept path leaves behind. Committed tokens of
row b fill columns 0..lengths[b]-1; what lies beyond is stale and masked, the next write starts at
column lengths[b] (placement.py). Column = position for every committed token, so moving an accepted
path down to its place keeps its rotary phase right (it was applied by depth).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.errors import UserError
from drafters.masks import ChainMasks
from drafters.native import kernels
from drafters.placement import Block, Placement, place
from drafters.structs import Reads

_FEW = 16  # new tokens a row, beyond which torch is as fast


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
        # one cell more than the rows have: what is written there is never read
        self.unread = rows * capacity
        shape = (layers, 2, self.unread + 1, heads, head_dim)
        size = torch.Size(shape).numel() * dtype.itemsize
        check_memory(size, torch.device(device), f"a cache of {rows} rows x {capacity} tokens")
        self.store = torch.zeros(shape, dtype=dtype, device=device)
        # by layer: keys and values by cell, and [rows, heads, capacity, head_dim] to read
        self.cells = [(layer[0], layer[1]) for layer in self.store]
        grid = self.store[:, :, :-1].unflatten(2, (rows, capacity)).transpose(3, 4)
        self._grids = [layer.unbind(0) for layer in grid]
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self.masks = ChainMasks(capacity, self.store.device)

    def place(self, blocks: Sequence[Block | None]) -> Placement:
        """Assign cells and masks to new tokens, one block a row; None leaves a row out.

        Nothing is committed: the same columns are assigned again until `keep` or `advance`.

        Raises:
            UserError: if a row would outgrow the capacity.
        """
        lengths = self.lengths.tolist()
        span = max(
            length + len(block.offset)
            for length, block in zip(lengths, blocks, strict=True)
            if block is not None
        )
        if span > self.capacity:
            raise UserError(
                f"a row needs {span} tokens but the cache holds {self.capacity}: "
                "ask for fewer new tokens or a larger capacity"
            )
        return place(blocks, self.lengths, span, self.masks)

    def write(self, layer: int, keys: Tensor, values: Tensor, placement: Placement) -> None:
        """Store keys and values [M, heads, head_dim] in their cells."""
        cells, (own_keys, own_values) = placement.cells, self.cells[layer]
        if isinstance(cells, slice):
            own_keys[cells], own_values[cells] = keys, values
        else:
            own_keys.index_copy_(0, cells, keys)
            own_values.index_copy_(0, cells, values)

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
    ) -> Tensor:
        """Let new tokens read what they may see of the cache (their own cells included).

        Query heads that share a key head are folded into the query axis: no key is repeated.
        The mask is explicit, so a block over a cached prefix is masked at its lower right.

        Args:
            layer: which layer's cells; the new keys and values must be written first.
            query: [M, query heads, head_dim].
            placement: of these M tokens.
            window: sliding window in positions.

        Returns:
            [M, query heads * head_dim].
        """
        dim = query.shape[-1]
        own = kernels(query.dtype, query.device.type)
        reads = self.reads(placement, query.shape[1], window)
        if own is not None and reads is not None:
            return own.attend(query, self.cells[layer], reads, dim**-0.5)
        keys, values = self.read(layer, placement)
        grid = placement.to_grid(query)
        count, width, heads, _ = grid.shape
        groups = heads // self.heads
        mask = placement.mask(window, groups, query.dtype)
        folded = grid.unflatten(2, (self.heads, groups))
        if width == 1:
            folded = folded[:, 0]
        else:
            folded = folded.permute(0, 2, 3, 1, 4).reshape(count, self.heads, groups * width, dim)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        if width != 1:
            out = out.view(count, self.heads, groups, width, dim).permute(0, 3, 1, 2, 4)
        return placement.from_grid(out.reshape(count, width, heads * dim))

    def reads(self, placement: Placement, heads: int, window: int | None) -> Reads | None:
        """Return what the kernels read for a few new tokens a row; None where torch serves.

        Args:
            placement: of the tokens.
            heads: query heads.
            window: sliding window in positions.
        """
        dtype = self.store.dtype
        if placement.width > _FEW or kernels(dtype, self.store.device.type) is None:
            return None
        return placement.reads(window, heads // self.heads, dtype, self.capacity)

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
            index, place = torch.tensor((source, target), device=self.store.device)
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


@dataclass(frozen=True)
class CacheAttention:
    """Attention of one layer over a cache: new keys and values are stored, then read.

    Args:
        cache: stores them.
        layer: whose.
        placement: of the new tokens.
        window: sliding window in positions.
    """

    cache: KVCache
    layer: int
    placement: Placement
    window: int | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return what queries [M, H, hd] read [M, H * hd]; key and value [M, Hkv, hd]."""
        self.cache.write(self.layer, key, value, self.placement)
        return self.cache.attend(self.layer, query, self.placement, window=self.window)

    def reads(self, heads: int) -> Reads | None:
        """Return what KVCache.reads does."""
        return self.cache.reads(self.placement, heads, self.window)


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

"""The lean forward at a few fixed shapes: equal work every round, which a GPU replays as a graph.

A round's tokens are laid into buffers of the next wider shape; what is left over writes to a cell
that nobody reads and is dropped. Launching some three hundred kernels a round one by one can take a
GPU longer than running them; replaying a captured graph launches them at once. On a CPU the same
buffers run without a graph: slower than the lean forward, but that is how the layout is tested.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from drafters.cache import KVCache
from drafters.lean import LeanModel
from drafters.placement import Placement

WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # new tokens of a row; wider forwards (prompts) are not padded
SPAN_STEP = 256  # columns read are rounded up to a multiple of this


class StaticModel(LeanModel):
    """A lean model that runs its rounds at fixed shapes.

    Args:
        model: the Hugging Face base model (without its head).

    Raises:
        NotImplementedError: as LeanModel.
    """

    def __init__(self, model: Any) -> None:
        """Take the weights over; shapes are made as they are met."""
        super().__init__(model)
        self._shapes: WeakKeyDictionary[KVCache, dict[Any, Shape]] = WeakKeyDictionary()

    def placed(
        self, tokens: Tensor, placement: Placement, cache: KVCache, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Run M placed tokens over a cache; return what a call does."""
        if placement.width > WIDTHS[-1]:
            return super().placed(tokens, placement, cache, taps)
        width = next(width for width in WIDTHS if width >= placement.width)
        span = min(-(-placement.span // SPAN_STEP) * SPAN_STEP, cache.capacity)
        shapes = self._shapes.setdefault(cache, {})
        key = width, span, taps
        if key not in shapes:
            shapes[key] = Shape(self, cache, width, span, taps)
        return shapes[key].run(tokens, placement, cache)

    def run_at(
        self, tokens: Tensor, placement: Placement, cache: KVCache, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Run tokens that fill a shape."""
        return super().placed(tokens, placement, cache, taps)


class Shape:
    """The buffers of one shape, and its graph on a GPU.

    Args:
        model: whose layers run.
        cache: whose rows take part, all of them.
        width: new tokens of a row.
        span: columns read.
        taps: layers whose raw outputs are wanted.
    """

    def __init__(
        self, model: StaticModel, cache: KVCache, width: int, span: int, taps: tuple[int, ...]
    ) -> None:
        """Allocate the buffers."""
        rows, device, dtype = cache.rows, cache.store.device, cache.store.dtype
        self.model, self.width, self.taps, self.unread = model, width, taps, cache.unread
        self.tokens = torch.zeros(rows * width, dtype=torch.int64, device=device)
        positions, cells = torch.zeros_like(self.tokens), torch.zeros_like(self.tokens)
        groups = model.layers[0].heads // model.layers[0].kv_heads
        self.masks: dict[tuple[int | None, int, torch.dtype], Tensor | None] = {
            (layer.window, groups, dtype): torch.zeros(
                rows, 1, groups * width, span, dtype=dtype, device=device
            )
            for layer in model.layers
        }
        self.placement = Placement(
            rows=slice(0, rows),
            cells=cells,
            positions=positions,
            grid=None,
            width=width,
            span=span,
            hidden=None,
            query_position=positions.view(rows, width),
            counts=[width] * rows,
            _masks=self.masks,
        )
        self._graph: Any = None
        self._outputs: tuple[Tensor, Tensor | None] | None = None

    def run(
        self, tokens: Tensor, placement: Placement, cache: KVCache
    ) -> tuple[Tensor, Tensor | None]:
        """Run M placed tokens, M at most what the shape holds."""
        place = self._fill(tokens, placement)
        if cache.store.device.type == "cuda" and torch.cuda.is_available():
            last, taps = self._replay(cache)
        else:
            last, taps = self.model.run_at(self.tokens, self.placement, cache, self.taps)
        return last[place], None if taps is None else taps[place]

    def _fill(self, tokens: Tensor, placement: Placement) -> Tensor:
        """Lay the tokens into the buffers; return their places there [M]."""
        device, wide, rows = self.tokens.device, placement.width, placement.rows
        grid = placement.grid
        if grid is None:
            grid = torch.arange(len(tokens), device=device)
        place = (grid // wide + rows.start) * self.width + grid % wide
        cells = placement.cells
        if isinstance(cells, slice):
            cells = torch.arange(cells.start, cells.stop, device=device)
        buffer = self.placement
        assert isinstance(buffer.cells, Tensor)
        self.tokens.zero_().index_copy_(0, place, tokens)
        buffer.positions.zero_().index_copy_(0, place, placement.positions)
        buffer.cells.fill_(self.unread).index_copy_(0, place, cells)
        for (window, groups, dtype), mask in self.masks.items():
            assert mask is not None
            mask.fill_(torch.finfo(dtype).min)
            given = placement.mask(window, groups, dtype)
            seen = mask.unflatten(2, (groups, self.width))[rows, :, :, :wide, : placement.span]
            seen.copy_(torch.zeros_like(seen) if given is None else given.view(seen.shape))
        return place

    def _replay(self, cache: KVCache) -> tuple[Tensor, Tensor | None]:
        """Run the captured graph; capture it first. It writes to this cache's own memory."""
        if self._graph is None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries allocate what they need outside the graph
                for _ in range(2):
                    self.model.run_at(self.tokens, self.placement, cache, self.taps)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._outputs = self.model.run_at(self.tokens, self.placement, cache, self.taps)
        self._graph.replay()
        assert self._outputs is not None
        return self._outputs

"""`dflash2`: DFlash whose slots look at the slot before and choose among candidates by its token.

Two additions. A two-tap convolution stands before and after every attention and MLP, with weights
that depend on what it reads; it starts as the identity and never crosses a block's start. A
selector scores a slot's most likely tokens anew once the token before is known. Source: DFlash 2
(z-lab, August 2026); the width of the codebooks is that of the kept ids here.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.block import BlockDrafter, BlockOptions, frozen_copy
from drafters.correction import Correction
from drafters.errors import UserError
from drafters.layers import DecoderLayer, LayerKind
from drafters.packed import Attend
from drafters.registry import register
from drafters.shape import TargetShape

_FLOOR = 30.0  # logits that tokens outside the candidates lie below the best: finite losses


@dataclass
class DFlash2Options(BlockOptions):
    """Options of `dflash2` beyond those of all block drafters.

    Args:
        candidates: most likely tokens of a slot that the selector chooses among.
        selector_rank: width of its codebooks over the kept ids.
        channels: neighbouring channels that share the changing part of a convolution.
    """

    candidates: int = 16
    selector_rank: int = 64
    channels: int = 16

    def __post_init__(self) -> None:
        """Check the counts."""
        super().__post_init__()
        for name in ("candidates", "selector_rank", "channels"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: give 1 or more")


class TwoTap(nn.Module):
    """The convolutions before and after one sublayer: out[t] = sum_o (base_o + D_o(t)) x[t - o].

    Args:
        width: of the states D.
        length: slots of a block; tokens come as whole blocks.
        channels: that share D.
    """

    def __init__(self, width: int, length: int, channels: int) -> None:
        """Start as the identity."""
        super().__init__()
        self.length, self.channels = length, channels
        self.base = nn.Parameter(torch.zeros(2, 2, width))
        self.base.data[:, 0] = 1.0
        self.dynamic = nn.Linear(width, 4 * width // channels, bias=False)
        nn.init.zeros_(self.dynamic.weight)

    def kernels(self, hidden: Tensor) -> Tensor:
        """Return the weights [..., 2 places, 2 taps, D] at each of the sublayer's inputs."""
        changing = self.dynamic(hidden).unflatten(-1, (2, 2, -1))
        return self.base + changing.repeat_interleave(self.channels, -1)

    def mix(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Mix every slot [..., D] with the one before it; kernel [..., 2, D]."""
        blocks = x.unflatten(-2, (-1, self.length))
        before = F.pad(blocks, (0, 0, 1, -1)).flatten(-3, -2)
        return kernel[..., 0, :] * x + kernel[..., 1, :] * before


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with convolutions around its two sublayers."""

    def __init__(self, shape: TargetShape, kind: LayerKind, length: int, channels: int) -> None:
        """Make untrained weights that compute what a plain layer does."""
        super().__init__(shape, kind)
        width = shape.hidden_size
        self.around_attention = TwoTap(width, length, channels)
        self.around_mlp = TwoTap(width, length, channels)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        embedding: Tensor | None = None,
    ) -> Tensor:
        """Run the layer over whole blocks of slots [..., D]."""
        hidden, taps = self.hidden_norm(x), self.around_attention
        first, last = taps.kernels(hidden).unbind(-3)
        x = x + taps.mix(self.attended(taps.mix(hidden, first), rotary, attend), last)
        hidden, taps = self.mlp_norm(x), self.around_mlp
        first, last = taps.kernels(hidden).unbind(-3)
        return x + taps.mix(self.inner(taps.mix(hidden, first)), last)


class Selector(Correction):
    """Scores candidate b after token a: unary(b) + <A[a] * (W state), B[b]>.

    Args:
        size: kept ids K; tokens that are not kept share one row of A.
        width: of the states.
        rank: of the codebooks.
        candidates: of a slot.
    """

    def __init__(self, size: int, width: int, rank: int, candidates: int) -> None:
        """Add nothing at the start."""
        super().__init__()
        self.candidates = min(candidates, size)
        self.before = nn.Embedding(size + 1, rank)
        self.gate = nn.Linear(width, rank, bias=False)
        self.after = nn.Linear(rank, size, bias=False)
        nn.init.zeros_(self.after.weight)

    def forward(self, unary: Tensor, state: Tensor, previous: Tensor) -> Tensor:
        """Return the logits [..., K] of the candidates; the others lie far below.

        While it learns, all tokens are candidates, and every other guess is learned without it, so
        that the slot's own law stays one to find candidates by.
        """
        wanted = self.before(previous) * self.gate(state)
        if self.training:
            known = torch.arange(len(unary), device=unary.device) % 2 == 0
            return unary + self.after(wanted) * known[:, None]
        best = unary.topk(self.candidates, dim=-1)
        rows = self.after.weight[best.indices]
        score = best.values + (rows @ wanted[..., None])[..., 0]
        floor = (score.amax(-1, keepdim=True) - _FLOOR).expand(*score.shape[:-1], unary.shape[-1])
        return floor.scatter(-1, best.indices.expand(score.shape), score)


@register
class DFlash2Drafter(BlockDrafter[DFlash2Options]):
    """DFlash 2 for one target.

    Args:
        config: resolved options.
        shape: of the target.

    Raises:
        UserError: if the target's width is no multiple of `channels`.
    """

    name: ClassVar[str] = "dflash2"
    schema = DFlash2Options
    lead: ClassVar[int] = 1

    def __init__(self, config: DFlash2Options, shape: TargetShape) -> None:
        """Make untrained weights that compute what a plain block drafter does."""
        if shape.hidden_size % config.channels:
            raise UserError(
                f"channels is {config.channels}: give a divisor of the target's width "
                f"{shape.hidden_size}"
            )
        super().__init__(config, shape)
        self.correction = Selector(
            len(self.vocabulary), shape.hidden_size, config.selector_rank, config.candidates
        )

    def new_layer(self, kind: LayerKind) -> DecoderLayer:
        """Make a layer with convolutions."""
        return ConvolvedLayer(self.shape, kind, self.length, self.config.channels)

    def frozen_layer(self, layer: DecoderLayer, dtype: torch.dtype) -> DecoderLayer:
        """Return a copy in this dtype: there is no packed form of such a layer."""
        return frozen_copy(layer, dtype)

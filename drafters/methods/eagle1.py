"""`eagle1`: EAGLE-1. One decoder layer continues the target's last states token by token.

The slot of token x[i+1] carries f[i], the target's state after its last norm. The layer's output
imitates f[i+1], and the target's own head reads token x[i+2] from it: no norm lies before the layer
and none between it and the head. Dynamic growth makes the same weights EAGLE-2; unroll > 1 trains
them on their own states too.
Sources: Li et al. 2024 (EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from drafters.alignment import slot_prediction
from drafters.base import Batch, Features, Prediction
from drafters.errors import UserError
from drafters.growth import Growth
from drafters.layers import Attend, DecoderLayer, LayerKind, Rotary, packed_layer, packed_linear
from drafters.packed import PackedLayer
from drafters.recurrent import RecurrentSession
from drafters.reduced import ReducedDrafter
from drafters.registry import register
from drafters.shape import TargetShape
from drafters.target import Target
from drafters.unrolled import unroll

_NOISE_LENGTH = 512  # of a text up to which the noise on its features is not lowered

Start = Literal["target", "random"]


@dataclass
class Eagle1Options:
    """Options of `eagle1`.

    Args:
        unroll: depths trained on; 1, as published, trains on true features alone.
        noise: in training every feature is off by up to so much, either way; in texts longer than
            512 tokens less, by their number.
        draft_vocab_size: ids of the target's head that guesses are taken from at most; 0: all.
        qk_norm: norm queries and keys, as Qwen3's layers do.
        attention_bias: biases on queries, keys and values, as Qwen2's layers have.
        fusion_bias: a bias on the map before the layer, as published; vLLM's code has none.
        init_fusion: the map before the layer starts by letting the feature through.
    """

    unroll: int = 1
    noise: float = 0.1
    draft_vocab_size: int = 0
    qk_norm: bool = False
    attention_bias: bool = False
    fusion_bias: bool = True
    init_fusion: Start = "target"

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.unroll < 1:
            raise UserError(f"unroll is {self.unroll}: give 1 or more")
        if self.noise < 0:
            raise UserError(f"noise is {self.noise}: give 0 or more")


@dataclass(frozen=True)
class Eagle1Maps:
    """The maps of an EAGLE-1 drafter, trainable or frozen, and its forward."""

    fusion: Callable[[Tensor], Tensor]
    layers: Sequence[DecoderLayer | PackedLayer]
    head: Callable[[Tensor], Tensor]

    def fuse(self, read: Tensor) -> Tensor:
        """Return the target's states as they are."""
        return read

    def advance(
        self,
        state: Tensor,
        embedding: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention: Sequence[Attend],
    ) -> Tensor:
        """Return the next states [..., D] of features or states and token embeddings [..., D]."""
        fused = self.fusion(torch.cat((embedding, state), -1)).to(state.dtype)
        return self.layers[0](fused, rotary, attention[0])

    def logits(self, state: Tensor) -> Tensor:
        """Return the draft logits [..., K] of states [..., D]."""
        return self.head(state)


@register
class Eagle1Drafter(ReducedDrafter[Eagle1Options]):
    """EAGLE-1 for one target.

    Args:
        config: resolved options.
        shape: of the target.
    """

    name: ClassVar[str] = "eagle1"
    schema = Eagle1Options
    features = Features(last=True)

    def __init__(self, config: Eagle1Options, shape: TargetShape) -> None:
        """Make untrained weights."""
        super().__init__(config, shape)
        self.rotary = Rotary(shape)
        width = shape.hidden_size
        self.fusion = nn.Linear(2 * width, width, bias=config.fusion_bias)
        kind = LayerKind(qk_norm=config.qk_norm, bias=config.attention_bias, input_norm=False)
        self.layer = DecoderLayer(shape, kind)

    @torch.no_grad()
    def init_from(self, target: Target) -> None:
        """Let the target's last state through to the layer, which starts at random.

        A copy of the target's last layer is no start: it reads raw states and writes what the
        final norm brings to scale, while features lie behind that norm (docs/training.md).
        """
        if self.config.init_fusion == "target":
            self.fusion.weight.zero_()
            self.fusion.weight[:, self.shape.hidden_size :].fill_diagonal_(1.0)
            if self.config.fusion_bias:
                self.fusion.bias.zero_()

    def parts(self, target: Target) -> Eagle1Maps:
        """Return the trainable maps and the target's head."""
        return Eagle1Maps(self.fusion, [self.layer], self.target_logits(target))

    def frozen(self, target: Target) -> Eagle1Maps:
        """Return a packed copy of the maps in the target's dtype, for decoding."""
        return Eagle1Maps(
            packed_linear(self.fusion, target.dtype),
            [packed_layer(self.layer, target.dtype)],
            self.target_logits(target),
        )

    def predict(self, batch: Batch, target: Target) -> list[Prediction]:
        """Let every slot predict the state and the token after its own, `unroll` steps."""
        maps = self.parts(target)
        state = self._noisy(batch.last.to(self.fusion.weight.dtype))
        steps = unroll(maps, self.rotary, batch, target, state, self.config.unroll)
        return [
            slot_prediction(batch, slots, step, state, maps.logits, hidden=True)
            for step, (slots, state) in enumerate(steps)
        ]

    def _noisy(self, features: Tensor) -> Tensor:
        """Return features [B, T, D] that a drafter's own might be, while it is trained."""
        if not self.training or not self.config.noise:
            return features
        scale = self.config.noise * min(1.0, _NOISE_LENGTH / features.shape[1])
        # drawn on the CPU, whose generator a run keeps: a resumed run meets the same noise
        noise = torch.rand(features.shape).to(features)
        return features + (2 * noise - 1) * scale

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> RecurrentSession:
        """Start a decoding session on a frozen copy of the weights."""
        return RecurrentSession(self, target, growth, rows, capacity)

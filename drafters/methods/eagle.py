"""`eagle`: EAGLE-3. One decoder layer continues the target's features token by token.

The slot of token x[i+1] carries the target's feature g[i], fused from several layers; it predicts
x[i+2]. Further guesses are fed the layer's own output in place of a feature, and training unrolls
exactly that. Embeddings are the target's; the head on the draft vocabulary is the drafter's own, as
published, or the target's.
Source: Li et al. 2025 (EAGLE-3, arXiv 2503.01840); tap_norm and norm_output: EAGLE-3.1 (2026).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.alignment import slot_prediction
from drafters.base import Batch, Features, Prediction
from drafters.errors import UserError
from drafters.growth import Growth
from drafters.layers import (
    Attend,
    DecoderLayer,
    LayerKind,
    Norm,
    Rotary,
    packed_layer,
    packed_linear,
    packed_norm,
)
from drafters.linear import FrozenLinear
from drafters.packed import PackedLayer
from drafters.recurrent import RecurrentSession
from drafters.reduced import ReducedDrafter
from drafters.registry import also_called, register
from drafters.session import CachedSession
from drafters.shape import TargetShape
from drafters.target import Target
from drafters.unrolled import unroll

Start = Literal["target", "random"]


@dataclass
class EagleOptions:
    """Options of `eagle`.

    Args:
        taps: target layers whose outputs are read (0-based); None: a low, a middle, a high one.
        layers: decoder layers of the drafter.
        unroll: depths trained on.
        draft_vocab_size: ids that the head keeps at most; 0: all.
        norm_before_residual: whether the first layer's residual is the normed feature.
        tap_norm: EAGLE-3.1: norm every tapped layer before the fusion.
        norm_output: EAGLE-3.1: feed back the normed state instead of the raw one.
        qk_norm: norm queries and keys, as Qwen3's layers do.
        attention_bias: biases on queries, keys and values, as Qwen2's layers have.
        head: a matrix of its own on the kept ids, or the target's rows, neither trained nor stored.
        init_layer: the layers start as copies of the target's last ones.
        init_embedding: what the first layer makes of the embedding at the start.
        init_fusion: the fused feature starts as the highest tap.
        init_head: head and last norm start as the target's.
    """

    taps: tuple[int, ...] | None = None
    layers: int = 1
    unroll: int = 4
    draft_vocab_size: int = 16384
    norm_before_residual: bool = False
    tap_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    head: Literal["own", "target"] = "own"
    init_layer: Start = "target"
    init_embedding: Literal["zero", "target", "random"] = "target"
    init_fusion: Start = "target"
    init_head: Start = "target"

    def __post_init__(self) -> None:
        """Check the counts."""
        if self.layers < 1 or self.unroll < 1:
            raise UserError(f"layers is {self.layers}, unroll {self.unroll}: give 1 or more")


@dataclass(frozen=True)
class EagleParts:
    """The maps of an eagle, trainable or frozen, and its forward."""

    fusion: Callable[[Tensor], Tensor]
    tap_norm: Tensor | None
    layers: Sequence[DecoderLayer | PackedLayer]
    norm: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    norm_output: bool
    epsilon: float

    def fuse(self, read: Tensor) -> Tensor:
        """Return features [..., D] of raw layer outputs [..., K * D]."""
        if self.tap_norm is not None:
            each = read.unflatten(-1, self.tap_norm.shape)
            normed = F.rms_norm(each, each.shape[-1:], eps=self.epsilon)
            read = (normed * self.tap_norm).flatten(-2)
        return self.fusion(read)

    def advance(
        self,
        state: Tensor,
        embedding: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention: Sequence[Attend],
    ) -> Tensor:
        """Return the next states [..., D] of features or states and token embeddings [..., D]."""
        state = self.layers[0](state, rotary, attention[0], embedding)
        for layer, attend in zip(self.layers[1:], attention[1:], strict=True):
            state = layer(state, rotary, attend)
        return self.norm(state) if self.norm_output else state

    def logits(self, state: Tensor) -> Tensor:
        """Return the draft logits [..., K] of states [..., D]."""
        return self.head(state if self.norm_output else self.norm(state))


@also_called("eagle3")
@register
class EagleDrafter(ReducedDrafter[EagleOptions]):
    """EAGLE-3 for one target.

    Args:
        config: resolved options.
        shape: of the target.
    """

    name: ClassVar[str] = "eagle"
    schema = EagleOptions

    def __init__(self, config: EagleOptions, shape: TargetShape) -> None:
        """Make untrained weights."""
        taps = shape.taps(config.taps)
        super().__init__(replace(config, taps=taps), shape)
        self.features = Features(layers=taps)
        self.rotary = Rotary(shape)
        width = shape.hidden_size
        self.fusion = nn.Linear(len(taps) * width, width, bias=False)
        self.tap_norm: nn.Parameter | None = None
        if config.tap_norm:
            self.tap_norm = nn.Parameter(torch.ones(len(taps), width))
        kind = LayerKind(
            wide=True,
            qk_norm=config.qk_norm,
            bias=config.attention_bias,
            normed_residual=config.norm_before_residual,
        )
        later = replace(kind, wide=False, normed_residual=False)
        kinds = [kind] + [later] * (config.layers - 1)
        layers = [DecoderLayer(shape, kind) for kind in kinds]
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(width, shape.norm_epsilon)
        if config.head == "own":
            self.head = nn.Linear(width, len(self.vocabulary), bias=False)

    @torch.no_grad()
    def init_from(self, target: Target) -> None:
        """Start where the target ends: its last layers, its head, its highest tapped layer.

        So the drafter begins as a shallow reading of the target's own features and learns what is
        missing; what each choice is worth can be measured by switching it off.
        """
        config, count = self.config, target.shape.num_layers
        if config.init_layer == "target":
            for place, layer in enumerate(self.decoder_layers()):
                last = max(0, count - len(self.layers) + place)
                layer.copy_from(target.layer_state(last), config.init_embedding)
        if config.init_fusion == "target":
            self.fusion.weight.zero_()
            self.fusion.weight[:, -self.shape.hidden_size :].fill_diagonal_(1.0)
        if config.init_head == "target":
            if config.head == "own":
                self.head.weight.copy_(self.head_rows(target))
            norm = target.norm_state().get("weight")
            if norm is not None:
                self.norm.weight.copy_(norm)

    def decoder_layers(self) -> list[DecoderLayer]:
        """Return the layers under their own type."""
        return cast("list[DecoderLayer]", list(self.layers))

    def parts(self, target: Target) -> EagleParts:
        """Return the trainable maps, and the target's rows where they are the head."""
        return EagleParts(
            self.fusion,
            self.tap_norm,
            self.decoder_layers(),
            self.norm,
            self.head if self.config.head == "own" else partial(F.linear, weight=self.lent(target)),
            self.config.norm_output,
            self.shape.norm_epsilon,
        )

    def frozen(self, target: Target) -> EagleParts:
        """Return a packed copy of the maps in the target's dtype, for decoding."""
        dtype = target.dtype
        return EagleParts(
            packed_linear(self.fusion, dtype),
            None if self.tap_norm is None else self.tap_norm.detach().to(dtype, copy=True),
            [packed_layer(layer, dtype) for layer in self.decoder_layers()],
            packed_norm(self.norm, dtype),
            packed_linear(self.head, dtype)
            if self.config.head == "own"
            else FrozenLinear([self.lent(target).to(dtype)]),
            self.config.norm_output,
            self.shape.norm_epsilon,
        )

    def lent(self, target: Target) -> Tensor:
        """Return the target's rows of the kept ids [K, D], as bfloat16 numbers.

        A guess need not be exact, and where a few tokens are bound by reading weights, those that
        are bfloat16 numbers take half the time.
        """
        rows = self.head_rows(target)
        return rows.bfloat16().to(self.fusion.weight)

    def completed(self, tensors: Mapping[str, Tensor], target: Target | None) -> dict[str, Tensor]:
        """Add the target's rows where they are the head.

        Raises:
            UserError: if they are, and there is no target.
        """
        if self.config.head == "own":
            return dict(tensors)
        if target is None:
            raise UserError("this drafter's head is the target's: give the target, --target")
        return {**tensors, "head.weight": self.lent(target)}

    def true_features(self, batch: Batch, parts: EagleParts) -> Tensor:
        """Return the fused features [B, T, D] of a batch."""
        if batch.taps is None:
            raise ValueError(f"{self.name} reads layers {self.features.layers}: batch.taps is None")
        taps = batch.taps.to(self.fusion.weight.dtype)
        # back in its own dtype: the residual stream stays exact under autocast
        return parts.fuse(taps).to(taps.dtype)

    def predict(self, batch: Batch, target: Target) -> list[Prediction]:
        """Unroll every slot `unroll` steps: true tokens, the drafter's own states."""
        parts = self.parts(target)
        state = self.true_features(batch, parts)
        steps = unroll(parts, self.rotary, batch, target, state, self.config.unroll)
        return [
            slot_prediction(batch, slots, step, state, parts.logits)
            for step, (slots, state) in enumerate(steps)
        ]

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> CachedSession:
        """Start a decoding session on a frozen copy of the weights."""
        return RecurrentSession(self, target, growth, rows, capacity)

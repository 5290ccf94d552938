"""BlockDrafter: a few decoder layers guess several tokens after an anchor in one forward.

The target's features of everything before the anchor are fused, normed and projected to keys and
values that every layer reads beside those of the block; they never change from layer to layer. The
block is the anchor's embedding and a learned vector in place of each token that is yet unknown.
Owns weights, training and the packed forward; what tells families apart is which slot guesses which
token (`lead`) and what corrects a slot's law once the token before it is known.
Source: DFlash (arXiv 2602.06036).
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.base import Batch, Features, Prediction
from drafters.block_session import BlockSession, PackedBlock
from drafters.blocks import Blocks
from drafters.correction import Correction
from drafters.errors import UserError
from drafters.growth import Growth
from drafters.layers import (
    DecoderLayer,
    LayerKind,
    Norm,
    Rotary,
    packed_layer,
    packed_linear,
    packed_norm,
    rotate,
)
from drafters.linear import FrozenLinear
from drafters.packed import PackedLayer
from drafters.parallel import check_levels
from drafters.reduced import ReducedDrafter
from drafters.shape import TargetShape
from drafters.target import Target


@dataclass
class BlockOptions:
    """Options of block drafters.

    Args:
        taps: target layers whose outputs are read (0-based); None: a low, a middle and a high one.
        layers: decoder layers of the drafter.
        slots: tokens guessed in one forward.
        anchors: blocks learned from in one sequence at most.
        draft_vocab_size: ids that the head keeps at most; 0: all.
        qk_norm: norm queries and keys, as Qwen3's layers do.
        attention_bias: biases on queries, keys and values, as Qwen2's layers have.
        init: what the weights start from: the target's last layers, highest tapped layer and head,
            or random.
    """

    taps: tuple[int, ...] | None = None
    layers: int = 2
    slots: int = 4
    anchors: int = 96
    draft_vocab_size: int = 8192
    qk_norm: bool = False
    attention_bias: bool = False
    init: Literal["target", "random"] = "target"

    def __post_init__(self) -> None:
        """Check the counts."""
        for name in ("layers", "slots", "anchors"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: give 1 or more")


Options = TypeVar("Options", bound=BlockOptions)


class BlockDrafter(ReducedDrafter[Options]):
    """A block drafter for one target.

    Args:
        config: resolved options.
        shape: of the target.
    """

    lead: ClassVar[int]
    """Slots before the first that guesses: 0 where a slot guesses the next token, 1 where it
    guesses its own, so that the anchor's has nothing to guess."""

    def __init__(self, config: Options, shape: TargetShape) -> None:
        """Make untrained weights."""
        taps = _default_taps(shape) if config.taps is None else shape.taps(config.taps)
        super().__init__(replace(config, taps=taps), shape)
        self.features = Features(layers=taps)
        self.rotary = Rotary(shape)
        width, epsilon = shape.hidden_size, shape.norm_epsilon
        self.fusion = nn.Linear(len(taps) * width, width, bias=False)
        self.context_norm = Norm(width, epsilon)
        self.mask = nn.Parameter(torch.randn(width) * 0.02)
        kind = LayerKind(qk_norm=config.qk_norm, bias=config.attention_bias)
        self.layers = nn.ModuleList(self.new_layer(kind) for _ in range(config.layers))
        self.norm = Norm(width, epsilon)
        self.head = nn.Linear(width, len(self.vocabulary), bias=False)
        self.correction: Correction | None = None  # a family may have one

    @property
    def length(self) -> int:
        """Return the number of slots of a block."""
        return self.lead + self.config.slots

    def new_layer(self, kind: LayerKind) -> DecoderLayer:
        """Make an untrained layer."""
        return DecoderLayer(self.shape, kind)

    def frozen_layer(self, layer: DecoderLayer, dtype: torch.dtype) -> PackedLayer | DecoderLayer:
        """Return a copy of a layer for decoding in this dtype."""
        return packed_layer(layer, dtype)

    @torch.no_grad()
    def init_from(self, target: Target) -> None:
        """Start where the target ends: its last layers read the highest tap, its head guesses.

        The layers' input norms are folded into their projections, because the context has one norm
        for all of them: at the start each makes of it the keys and values that the target's layer
        would make of that state.
        """
        if self.config.init == "random":
            return
        count = target.shape.num_layers
        for place, layer in enumerate(self.decoder_layers()):
            layer.copy_from(target.layer_state(max(0, count - len(self.layers) + place)))
            layer.qkv.weight.mul_(layer.hidden_norm.weight)
            layer.hidden_norm.weight.fill_(1.0)
        self.fusion.weight.zero_()
        self.fusion.weight[:, -self.shape.hidden_size :].fill_diagonal_(1.0)
        every = torch.arange(self.shape.vocab_size, device=target.device)
        self.mask.copy_(target.embed(every).float().mean(0))
        self.head.weight.copy_(self.head_rows(target))
        norm = target.norm_state().get("weight")
        if norm is not None:
            self.norm.weight.copy_(norm)

    def decoder_layers(self) -> list[DecoderLayer]:
        """Return the layers under their own type."""
        return cast("list[DecoderLayer]", list(self.layers))

    def states(self, batch: Batch, target: Target, blocks: Blocks) -> Tensor:
        """Return the post-norm states of all guessing slots [B, A, slots, D]."""
        assert batch.taps is not None
        dtype = self.fusion.weight.dtype
        context = self.context_norm(self.fusion(batch.taps.to(dtype)))
        turned = self.rotary(batch.position, dtype)
        tokens = batch.ids.gather(1, blocks.anchors)
        anchor = target.embed(tokens).to(dtype)[..., None, :]
        unknown = self.mask.expand(*tokens.shape, self.length - 1, -1)
        x = torch.cat((anchor, unknown), -2).flatten(1, 2)
        rotary = self.rotary(blocks.positions, dtype)
        for layer in self.decoder_layers():
            x = layer(x, rotary, blocks.attention(*context_keys(layer, context, turned)))
        return self.norm(x.unflatten(1, (-1, self.length))[:, :, self.lead :])

    def predict(self, batch: Batch, target: Target) -> list[Prediction]:
        """Let the blocks' d-th guess imitate position a + d - 1 for anchor a.

        A block is learned from down to its first token without a supervised label.
        """
        if batch.taps is None:
            raise ValueError(f"{self.name} reads layers {self.features.layers}: batch.taps is None")
        blocks = Blocks(batch, self.config.anchors, self.length, vary=self.training)
        states = self.states(batch, target, blocks)
        rows, length = batch.ids.shape
        first = torch.arange(rows, device=batch.ids.device)[:, None] * length + blocks.anchors
        predictions: list[Prediction] = []
        for depth in range(1, self.config.slots + 1):
            learned = blocks.learned(depth)
            group, state = first[learned], states[:, :, depth - 1][learned]
            positions = group + depth - 1
            previous = self.vocabulary.place(batch.ids.flatten()[positions])
            logits = partial(self._logits, state, previous)
            predictions.append(
                Prediction(positions, depth, group, logits, self._auxiliary(state, previous))
            )
        return predictions

    def _logits(self, state: Tensor, previous: Tensor, span: slice) -> Tensor:
        unary = self.head(state[span])
        if self.correction is None:
            return unary
        return self.correction(unary, state[span], previous[span])

    def _auxiliary(self, state: Tensor, previous: Tensor) -> Mapping[str, Tensor]:
        confidence = None
        if self.correction is not None:
            confidence = self.correction.confidence(state, previous)
        return {} if confidence is None else {"confidence": confidence}

    def calibrate(self, confidence: Tensor, taken: Tensor) -> None:
        """Fit how confidence is read to chains of it and of acceptance [N, slots]."""
        if self.correction is not None:
            self.correction.calibrate(confidence, taken)

    def frozen(self, dtype: torch.dtype) -> PackedBlock:
        """Return a packed copy of the maps in this dtype, for decoding."""
        layers = self.decoder_layers()
        correction = self.correction
        if correction is not None:
            correction = frozen_copy(correction, dtype)
        return PackedBlock(
            packed_linear(self.fusion, dtype),
            packed_norm(self.context_norm, dtype),
            _packed_keys(layers, dtype),
            [None if x.key_norm is None else packed_norm(x.key_norm, dtype) for x in layers],
            [self.frozen_layer(layer, dtype) for layer in layers],
            packed_norm(self.norm, dtype),
            packed_linear(self.head, dtype),
            self.mask.detach().to(dtype, copy=True),
            correction,
        )

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> BlockSession:
        """Start a decoding session on a frozen copy of the weights.

        Raises:
            UserError: if the growth asks for more levels than there are slots.
        """
        check_levels(growth, self.config.slots, "slots")
        return BlockSession(self, target, growth, rows, capacity)


Module = TypeVar("Module", bound=nn.Module)


def frozen_copy(module: Module, dtype: torch.dtype) -> Module:
    """Return a copy of a module in this dtype that later training does not reach."""
    return deepcopy(module).to(dtype).requires_grad_(False).eval()


def context_keys(
    layer: DecoderLayer, context: Tensor, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return a layer's keys and values [..., Hkv, hd] of the normed context [..., D]."""
    weight, bias = _key_rows(layer)
    key, value = F.linear(context, weight, bias).unflatten(-1, (-1, layer.head_dim)).chunk(2, -2)
    if layer.key_norm is not None:
        key = layer.key_norm(key)
    return rotate(key, *rotary), value


def _key_rows(layer: DecoderLayer) -> tuple[Tensor, Tensor | None]:
    """Return the part of a layer's projection that makes keys and values."""
    first, bias = layer.heads * layer.head_dim, layer.qkv.bias
    return layer.qkv.weight[first:], None if bias is None else bias[first:]


def _packed_keys(layers: Sequence[DecoderLayer], dtype: torch.dtype) -> FrozenLinear:
    """Return one map from the context to the keys and values of all layers."""
    weights, biases = zip(*(_key_rows(layer) for layer in layers), strict=True)
    given = [bias.detach().to(dtype) for bias in biases if bias is not None]
    return FrozenLinear([weight.detach().to(dtype) for weight in weights], given or None)


def _default_taps(shape: TargetShape) -> tuple[int, ...]:
    """Return three layers spread over 1 to L - 3; the last one's output is what the last two read.

    Raises:
        UserError: if the target is too shallow.
    """
    low, middle, _ = shape.default_taps
    return low, middle, shape.num_layers - 3

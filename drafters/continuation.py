"""A module that continues a state by one token: their norms, a projection of both, a layer, a norm.

Training runs its layers, decoding packed copies; which state comes in is the drafter's matter.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafters.layers import (
    Attend,
    DecoderLayer,
    LayerKind,
    Norm,
    packed_layer,
    packed_linear,
    packed_norm,
)
from drafters.packed import PackedLayer
from drafters.shape import TargetShape


@dataclass(frozen=True)
class ContinuationParts:
    """The maps of one module, trainable or frozen."""

    embedding_norm: Callable[[Tensor], Tensor]
    hidden_norm: Callable[[Tensor], Tensor]
    project: Callable[[Tensor], Tensor]
    layer: DecoderLayer | PackedLayer
    norm: Callable[[Tensor], Tensor]

    def advance(
        self, state: Tensor, embedding: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Return the next states [..., D] of states and token embeddings [..., D]."""
        joined = torch.cat((self.embedding_norm(embedding), self.hidden_norm(state)), -1)
        # the residual stream stays exact under autocast
        return self.layer(self.project(joined).to(state.dtype), rotary, attend)


class Continuation(nn.Module):
    """One module: two norms, a projection of what they give, a decoder layer, a norm."""

    def __init__(self, shape: TargetShape, kind: LayerKind) -> None:
        """Make untrained weights."""
        super().__init__()
        width, epsilon = shape.hidden_size, shape.norm_epsilon
        self.embedding_norm = Norm(width, epsilon)
        self.hidden_norm = Norm(width, epsilon)
        self.project = nn.Linear(2 * width, width, bias=False)
        self.layer = DecoderLayer(shape, kind)
        self.norm = Norm(width, epsilon)

    def parts(self) -> ContinuationParts:
        """Return the trainable maps."""
        return ContinuationParts(
            self.embedding_norm, self.hidden_norm, self.project, self.layer, self.norm
        )

    def frozen(self, dtype: torch.dtype) -> ContinuationParts:
        """Return a packed copy of the maps."""
        return ContinuationParts(
            packed_norm(self.embedding_norm, dtype),
            packed_norm(self.hidden_norm, dtype),
            packed_linear(self.project, dtype),
            packed_layer(self.layer, dtype),
            packed_norm(self.norm, dtype),
        )

    def places(self) -> dict[str, Tensor]:
        """Return the weights by the names that shipped ones have in drafters/formats/."""
        layer = self.layer
        sizes = [n * layer.head_dim for n in (layer.heads, layer.kv_heads, layer.kv_heads)]
        projections = [f"self_attn.{x}_proj" for x in "qkv"]
        gate, up = layer.gate_up.weight.chunk(2)
        found = {
            "embedding_norm.weight": self.embedding_norm.weight,
            "hidden_norm.weight": self.hidden_norm.weight,
            "project.weight": self.project.weight,
            "norm.weight": self.norm.weight,
            "input_layernorm.weight": layer.hidden_norm.weight,
            "post_attention_layernorm.weight": layer.mlp_norm.weight,
            "self_attn.o_proj.weight": layer.out.weight,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": layer.down.weight,
        }
        for kind, both in (("weight", layer.qkv.weight), ("bias", layer.qkv.bias)):
            if both is not None:
                parts = zip(projections, both.split(sizes), strict=True)
                found |= {f"{name}.{kind}": part for name, part in parts}
        if layer.query_norm is not None and layer.key_norm is not None:
            found["self_attn.q_norm.weight"] = layer.query_norm.weight
            found["self_attn.k_norm.weight"] = layer.key_norm.weight
        return found

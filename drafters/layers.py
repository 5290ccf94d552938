"""The layers that all neural drafters train: rotary phases, one decoder layer, its packed copies.

Training runs them on [B, T, ...] tensors, decoding runs packed copies (packed.py) on a flat
[M, ...] list of tokens; attention comes in as a callable. Nothing here knows a drafter, a cache or
a batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafters.errors import UserError
from drafters.linear import FrozenLinear
from drafters.packed import Attend, PackedLayer, PackedNorm
from drafters.shape import TargetShape

_ROPES = ("default", "linear", "llama3", "yarn")  # those whose phases do not change with the length


class Rotary:
    """Rotary phases of a target's kind, computed in float32.

    Args:
        shape: whose rope parameters are followed. Heads are turned whole, also where the target
            turns only a part of each (partial_rotary_factor).

    Raises:
        UserError: if the kind changes with the length of the text.
    """

    def __init__(self, shape: TargetShape) -> None:
        """Compute the frequencies."""
        rope = shape.rope
        rope = rope.get("full_attention", rope)  # some models keep one set a kind of layer
        kind = rope.get("rope_type", "default")
        if kind not in _ROPES:
            raise UserError(
                f"the target's rope type is {kind!r}: drafters with attention layers are built "
                f"for {', '.join(_ROPES)}"
            )
        if kind == "default":
            steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
            self.frequency, self.scale = rope["rope_theta"] ** -steps, 1.0
            return
        config = LlamaConfig(
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_positions,
            rope_parameters={**rope, "partial_rotary_factor": 1.0},
        )
        with torch.device("cpu"):  # even where a drafter's weights take no memory
            self.frequency, self.scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))

    def __call__(
        self, positions: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin [..., 1, hd] of positions [...], as `rotate` takes them."""
        angle = positions[..., None, None] * self.frequency.to(positions.device)
        cos, sin = angle.cos() * self.scale, angle.sin() * self.scale
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


@dataclass(frozen=True)
class LayerKind:
    """What one decoder layer looks like beyond the target's sizes.

    Args:
        wide: its attention reads [embedding; hidden], 2 D wide, instead of the hidden state.
        qk_norm: queries and keys are normed head by head (Qwen3).
        bias: queries, keys and values have a bias (Qwen2).
        normed_residual: the residual is the normed hidden state instead of the raw one.
        input_norm: whether what the attention reads is normed first.
    """

    wide: bool = False
    qk_norm: bool = False
    bias: bool = False
    normed_residual: bool = False
    input_norm: bool = True


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary phases to [..., H, hd]; cos, sin [..., 1, hd], sin's first half negated."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], x[..., :half]), -1) * sin


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of its weight.

    Under autocast activations are bfloat16 and weights float32, a mixture that torch norms slowly
    and with a warning.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dimension."""
        return super().forward(x.to(self.weight.dtype))


class DecoderLayer(nn.Module):
    """A Llama-like decoder layer: grouped attention and SwiGLU.

    Args:
        shape: heads and widths; hidden_size need not be num_heads * head_dim.
        kind: see LayerKind.
    """

    def __init__(self, shape: TargetShape, kind: LayerKind) -> None:
        """Make untrained weights."""
        super().__init__()
        hidden, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
        epsilon = shape.norm_epsilon
        self.kind = kind
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, head_dim
        width = (self.heads + 2 * self.kv_heads) * head_dim
        self.embedding_norm = Norm(hidden, epsilon) if kind.wide else None
        if kind.input_norm:
            self.hidden_norm = Norm(hidden, epsilon)
        self.qkv = nn.Linear((1 + kind.wide) * hidden, width, bias=kind.bias)
        self.query_norm = Norm(head_dim, epsilon) if kind.qk_norm else None
        self.key_norm = Norm(head_dim, epsilon) if kind.qk_norm else None
        self.out = nn.Linear(self.heads * head_dim, hidden, bias=False)
        self.mlp_norm = Norm(hidden, epsilon)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        embedding: Tensor | None = None,
    ) -> Tensor:
        """Run the layer.

        Args:
            x: [..., D] hidden states.
            rotary: cos and sin [..., 1, hd] of the tokens' positions.
            attend: stores keys and values and returns what each token reads.
            embedding: [..., D] token embeddings; for a wide layer only.

        Returns:
            [..., D] hidden states after the layer.
        """
        hidden = self.hidden_norm(x) if self.kind.input_norm else x
        residual = hidden if self.kind.normed_residual else x
        if self.embedding_norm is not None:
            assert embedding is not None
            hidden = torch.cat((self.embedding_norm(embedding), hidden), -1)
        x = residual + self.attended(hidden, rotary, attend)
        return x + self.inner(self.mlp_norm(x))

    def attended(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return what the attention adds [..., D] for normed hidden states."""
        qkv = self.qkv(hidden).unflatten(-1, (-1, self.head_dim))
        both, value = qkv.split((self.heads + self.kv_heads, self.kv_heads), -2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = both.split((self.heads, self.kv_heads), -2)
            both = torch.cat((self.query_norm(query), self.key_norm(key)), -2)
        query, key = rotate(both, *rotary).split((self.heads, self.kv_heads), -2)
        return self.out(attend(query, key, value))

    def inner(self, hidden: Tensor) -> Tensor:
        """Return what the MLP adds [..., D] for normed hidden states [..., D]."""
        gate, up = self.gate_up(hidden).chunk(2, -1)
        return self.down(F.silu(gate) * up)

    @torch.no_grad()
    def copy_from(self, state: Mapping[str, Tensor], embedding: str = "zero") -> None:
        """Start from a target's layer where names and shapes fit.

        A wide layer reads the hidden state with the target's columns: on that half it computes what
        the target's layer does.

        Args:
            state: by Hugging Face names (self_attn.q_proj.weight, ...).
            embedding: the wide layer's other half: "zero"; "target", the same columns again (in a
                residual stream the embedding lies in the space that later layers read); or
                "random", as it is.
        """
        hidden = self.out.out_features
        projections = [f"self_attn.{x}_proj" for x in "qkv"]
        own, other = self.qkv.weight[:, -hidden:], self.qkv.weight[:, :hidden]
        if self.kind.input_norm:
            _copy(self.hidden_norm.weight, state, ["input_layernorm.weight"])
        _copy(own, state, [f"{name}.weight" for name in projections])
        _copy(self.out.weight, state, ["self_attn.o_proj.weight"])
        _copy(self.mlp_norm.weight, state, ["post_attention_layernorm.weight"])
        _copy(self.gate_up.weight, state, ["mlp.gate_proj.weight", "mlp.up_proj.weight"])
        _copy(self.down.weight, state, ["mlp.down_proj.weight"])
        if self.qkv.bias is not None:
            self.qkv.bias.zero_()
            _copy(self.qkv.bias, state, [f"{name}.bias" for name in projections])
        if self.query_norm is not None and self.key_norm is not None:
            _copy(self.query_norm.weight, state, ["self_attn.q_norm.weight"])
            _copy(self.key_norm.weight, state, ["self_attn.k_norm.weight"])
        if self.embedding_norm is not None and embedding == "target":
            other.copy_(own)
            self.embedding_norm.weight.copy_(self.hidden_norm.weight)
        elif self.embedding_norm is not None and embedding == "zero":
            other.zero_()


def _copy(weight: Tensor, state: Mapping[str, Tensor], names: list[str]) -> None:
    """Copy the named tensors, stacked, if all are there and fit."""
    found = [state[name] for name in names if name in state]
    if len(found) == len(names):
        source = torch.cat(found)
        if source.shape == weight.shape:
            weight.copy_(source)


def packed_norm(norm: Norm, dtype: torch.dtype) -> PackedNorm:
    """Return a copy of a norm in this dtype; later training does not reach it."""
    assert norm.eps is not None
    return PackedNorm(norm.weight.detach().to(dtype, copy=True), norm.eps)


def packed_linear(linear: nn.Linear, dtype: torch.dtype) -> FrozenLinear:
    """Return a packed copy of a linear map in this dtype."""
    bias = None if linear.bias is None else [linear.bias.detach().to(dtype, copy=True)]
    return FrozenLinear([linear.weight.detach().to(dtype, copy=True)], bias)


def packed_layer(layer: DecoderLayer, dtype: torch.dtype) -> PackedLayer:
    """Return a copy of a layer for decoding in this dtype; later training does not reach it."""

    def norm(maybe: Norm | None) -> PackedNorm | None:
        return None if maybe is None else packed_norm(maybe, dtype)

    gate, up = (FrozenLinear([half.clone()]) for half in layer.gate_up.weight.to(dtype).chunk(2))
    return PackedLayer(
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        input_norm=packed_norm(layer.hidden_norm, dtype) if layer.kind.input_norm else None,
        qkv=packed_linear(layer.qkv, dtype),
        out=packed_linear(layer.out, dtype),
        mlp_norm=packed_norm(layer.mlp_norm, dtype),
        gate=gate,
        up=up,
        down=packed_linear(layer.down, dtype),
        query_norm=norm(layer.query_norm),
        key_norm=norm(layer.key_norm),
        embedding_norm=norm(layer.embedding_norm),
        normed_residual=layer.kind.normed_residual,
    )

"""The lean forward of Llama-like targets: fused, packed projections over a flat list of tokens.

Driven by the Hugging Face config and weights of the loaded model; target.py tests it against the
model's own forward at load and falls back with a warning where they differ. It knows nothing of
trees or rows: tokens come with positions, attention is a callable.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.linear import FrozenLinear

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [M, H, hd], key, value [M, Hkv, hd]) -> [M, H * hd]."""


@dataclass
class LeanLayer:
    """Frozen weights of one decoder layer."""

    input_norm: Tensor
    qkv: FrozenLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: FrozenLinear
    mlp_norm: Tensor
    gate_up: FrozenLinear
    down: FrozenLinear
    window: int | None


class LeanModel:
    """Decoder layers and final norm of one Llama-like model.

    Args:
        model: the Hugging Face base model (without its head).

    Raises:
        NotImplementedError: if the family or one of its settings has no lean form; the message
            names it.
    """

    def __init__(self, model: Any) -> None:
        """Take the weights over in packed form."""
        config = model.config
        if config.model_type not in FAMILIES:
            raise NotImplementedError(f"model type {config.model_type} has no lean forward")
        if config.hidden_act not in ("silu", "swish"):
            raise NotImplementedError(f"activation {config.hidden_act} has no lean forward")
        rope = config.rope_parameters
        if rope.get("rope_type", "default") in ("dynamic", "longrope"):
            raise NotImplementedError(f"rope type {rope['rope_type']} changes with the length")
        self.epsilon = config.rms_norm_eps
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.layers = [_lean_layer(layer) for layer in model.layers]
        self.head_dim = self.layers[0].qkv.out_features // (self.heads + 2 * self.kv_heads)
        self.norm = model.norm.weight.detach()
        self.embedding = model.embed_tokens.weight.detach()
        self.cos, self.sin = _rotary_table(model, config.max_position_embeddings)

    def __call__(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers over M tokens.

        Args:
            tokens: [M] int64.
            positions: [M] int64 context positions.
            attend: stores keys and values and returns what each token reads.
            taps: layers whose raw outputs are wanted.

        Returns:
            The post-norm state [M, D], and the taps [M, len(taps) * D] or None.
        """
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.cos[positions], self.sin[positions]
        tapped = []
        for index, layer in enumerate(self.layers):
            x = self._layer(index, layer, x, (cos, sin), attend)
            if index in taps:
                tapped.append(x)
        last = F.rms_norm(x, (x.shape[-1],), self.norm, self.epsilon)
        return last, torch.cat(tapped, -1) if tapped else None

    def _layer(
        self,
        index: int,
        layer: LeanLayer,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        hidden = F.rms_norm(x, (x.shape[-1],), layer.input_norm, self.epsilon)
        qkv = layer.qkv(hidden).view(len(x), -1, self.head_dim)
        both, value = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if layer.query_norm is not None:
            query, key = both.split((self.heads, self.kv_heads), dim=1)
            query = F.rms_norm(query, (self.head_dim,), layer.query_norm, self.epsilon)
            key = F.rms_norm(key, (self.head_dim,), layer.key_norm, self.epsilon)
            both = torch.cat((query, key), 1)
        query, key = rotate(both, *rotary).split((self.heads, self.kv_heads), dim=1)
        x = x + layer.out(attend(index, query, key, value))
        hidden = F.rms_norm(x, (x.shape[-1],), layer.mlp_norm, self.epsilon)
        gate, up = layer.gate_up(hidden).chunk(2, -1)
        return x + layer.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary phases to [M, H, hd]; cos, sin [M, 1, hd], sin with its first half negated."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], x[..., :half]), -1) * sin


def _rotary_table(model: Any, length: int) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin [length, 1, hd] from the model's own rotary module."""
    with torch.no_grad():
        cos, sin = model.rotary_emb(model.embed_tokens.weight[:1], torch.arange(length)[None])
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
    return cos[0, :, None].contiguous(), signed[:, None].contiguous()


def _lean_layer(layer: Any) -> LeanLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    normed = attention.config.model_type == "qwen3"
    return LeanLayer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=_fuse(*projections),
        query_norm=attention.q_norm.weight.detach() if normed else None,
        key_norm=attention.k_norm.weight.detach() if normed else None,
        out=_fuse(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=_fuse(mlp.gate_proj, mlp.up_proj),
        down=_fuse(mlp.down_proj),
        window=window_of(attention),
    )


def _fuse(*linears: Any) -> FrozenLinear:
    if any(type(linear) is not nn.Linear for linear in linears):
        raise NotImplementedError(f"a projection is a {type(linears[0]).__name__}, not a Linear")
    biases = [linear.bias for linear in linears]
    some = [bias for bias in biases if bias is not None]
    if some and len(some) != len(biases):
        raise NotImplementedError("only some of the fused projections have a bias")
    return FrozenLinear([linear.weight for linear in linears], some or None)


def window_of(attention: Any) -> int | None:
    """Return the sliding window of one attention layer in positions, None for full attention."""
    config, index = attention.config, attention.layer_idx
    window = config.to_dict().get("sliding_window")
    kinds = config.to_dict().get("layer_types")
    if window is None or (kinds is not None and kinds[index] != "sliding_attention"):
        return None
    return None if config.to_dict().get("use_sliding_window") is False else window

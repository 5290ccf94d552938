"""The lean forward of Llama-like targets: fused, packed projections over a flat list of tokens.

Driven by the Hugging Face config and weights of the loaded model; target.py tests it against the
model's own forward at load and falls back with a warning where they differ. Its layers know
nothing of trees or rows: tokens come with positions, attention is a callable.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.cache import CacheAttention, KVCache
from drafters.linear import FrozenLinear
from drafters.packed import Attend, PackedLayer, PackedNorm
from drafters.placement import Placement

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


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
        self.layers = [_packed_layer(layer, config) for layer in model.layers]
        self.norm = PackedNorm(model.norm.weight.detach(), config.rms_norm_eps)
        self.embedding = model.embed_tokens.weight.detach()
        self.cos, self.sin = _rotary_table(model, config.max_position_embeddings)

    def __call__(
        self, tokens: Tensor, positions: Tensor, attention: Sequence[Attend], taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers over M tokens.

        Args:
            tokens: [M] int64.
            positions: [M] int64 context positions.
            attention: of every layer.
            taps: layers whose raw outputs are wanted.

        Returns:
            The post-norm state [M, D], and the taps [M, len(taps) * D] or None.
        """
        x = F.embedding(tokens, self.embedding)
        rotary = self.cos[positions], self.sin[positions]
        tapped = []
        for index, (layer, attend) in enumerate(zip(self.layers, attention, strict=True)):
            x = layer(x, rotary, attend)
            if index in taps:
                tapped.append(x)
        return self.norm(x), torch.cat(tapped, -1) if tapped else None

    def placed(
        self, tokens: Tensor, placement: Placement, cache: KVCache, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Run M placed tokens over a cache; return what a call does."""
        attention = [
            CacheAttention(cache, index, placement, layer.window)
            for index, layer in enumerate(self.layers)
        ]
        return self(tokens, placement.positions, attention, taps)


def _rotary_table(model: Any, length: int) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin [length, 1, hd] from the model's own rotary module."""
    weight = model.embed_tokens.weight
    with torch.no_grad():
        positions = torch.arange(length, device=weight.device)[None]
        cos, sin = model.rotary_emb(weight[:1], positions)
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
    return cos[0, :, None].contiguous(), signed[:, None].contiguous()


def _packed_layer(layer: Any, config: Any) -> PackedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    qkv = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
    query_norm = key_norm = None
    if config.model_type == "qwen3":
        query_norm, key_norm = _norm(attention.q_norm, config), _norm(attention.k_norm, config)
    return PackedLayer(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=qkv.out_features // (heads + 2 * kv_heads),
        input_norm=_norm(layer.input_layernorm, config),
        qkv=qkv,
        out=_fuse(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm, config),
        gate=_fuse(mlp.gate_proj),
        up=_fuse(mlp.up_proj),
        down=_fuse(mlp.down_proj),
        query_norm=query_norm,
        key_norm=key_norm,
        window=window_of(attention),
    )


def _norm(norm: Any, config: Any) -> PackedNorm:
    return PackedNorm(norm.weight.detach(), config.rms_norm_eps)


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

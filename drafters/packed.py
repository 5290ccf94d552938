"""One Llama-like decoder layer for decoding: packed weights and as few operations as will do.

The target's lean forward and every drafter with attention layers run through it, so both cost what
the machine allows: at one token a step is bound by reading weights, and each further operation on a
few hundred numbers would take longer than its arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.cache import CacheAttention
from drafters.linear import FrozenLinear
from drafters.native import Kernels, kernels
from drafters.structs import Layer, Norm, Reads, layer, norm

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [..., H, hd], key and value [..., Hkv, hd]) -> [..., H * hd]."""


@dataclass(frozen=True)
class PackedNorm:
    """An RMSNorm whose weight never changes.

    Args:
        weight: [D].
        epsilon: added to the mean of squares.
    """

    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        """Norm the last dimension of [..., D]."""
        own = kernels(x.dtype, x.device.type)
        if own is None or not x.is_contiguous():
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return own.rms_norm(x, self.struct)

    @cached_property
    def struct(self) -> Norm:
        """Return it as the kernels take it."""
        return norm(self.weight.contiguous(), self.epsilon)


@dataclass(frozen=True)
class PackedLayer:
    """Frozen weights of one decoder layer, and its forward.

    Args:
        heads, kv_heads, head_dim: of the attention.
        input_norm: before the attention, or None (EAGLE-1).
        qkv: queries, keys and values in one map; twice as wide with an embedding_norm.
        out: after the attention.
        mlp_norm: before the MLP.
        gate, up, down: the SwiGLU.
        query_norm, key_norm: of each head (Qwen3), or None.
        embedding_norm: of the token embedding that the attention reads beside the hidden state
            (EAGLE-3's first layer), or None.
        normed_residual: whether the residual is the normed hidden state instead of the raw one.
        window: sliding window in positions, None for full attention; `attend` minds it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    input_norm: PackedNorm | None
    qkv: FrozenLinear
    out: FrozenLinear
    mlp_norm: PackedNorm
    gate: FrozenLinear
    up: FrozenLinear
    down: FrozenLinear
    query_norm: PackedNorm | None = None
    key_norm: PackedNorm | None = None
    embedding_norm: PackedNorm | None = None
    normed_residual: bool = False
    window: int | None = None

    def __call__(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        embedding: Tensor | None = None,
    ) -> Tensor:
        """Run the layer over a flat list of tokens.

        Args:
            x: [M, D] hidden states.
            rotary: cos and signed sin [M, 1, hd] of the tokens' positions.
            attend: stores keys and values and returns what each token reads.
            embedding: [M, D] token embeddings, with an embedding_norm only.

        Returns:
            [M, D] hidden states after the layer.
        """
        own = self.qkv.kernels
        if own and isinstance(attend, CacheAttention) and len(x) <= self.qkv.most_tokens:
            reads = attend.reads(self.heads)
            if reads is not None:
                return self._at_once(own, reads, x, rotary, attend, embedding)
        hidden = x if self.input_norm is None else self.input_norm(x)
        residual = hidden if self.normed_residual else x
        if self.embedding_norm is not None:
            assert embedding is not None
            hidden = torch.cat((self.embedding_norm(embedding), hidden), -1)
        qkv = self.qkv(hidden).view(len(x), -1, self.head_dim)
        turned = self.heads + self.kv_heads
        if self.query_norm is not None and self.key_norm is not None:
            qkv[:, : self.heads] = self.query_norm(qkv[:, : self.heads])
            qkv[:, self.heads : turned] = self.key_norm(qkv[:, self.heads : turned])
        both = qkv[:, :turned]
        rotate_(both, *rotary)
        query, key, value = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        x = self.out.add(attend(query, key, value), residual)
        hidden = self.mlp_norm(x)
        return self.down.add(self.up.multiply(hidden, self.gate.silu(hidden)), x)

    def _at_once(
        self,
        own: Kernels,
        reads: Reads,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: CacheAttention,
        embedding: Tensor | None,
    ) -> Tensor:
        """Let the kernels run a layer over a few tokens: thirty calls a step, not four hundred."""
        cells, cache = attend.placement.cell_list, attend.cache.cells[attend.layer]
        # which the kernels do not ask
        assert (x.dtype, x.shape[-1]) == (cache[0].dtype, self.out.out_features)
        beside = None if embedding is None else embedding.contiguous()
        return own.layer(self.struct, x.contiguous(), rotary, reads, cells, cache, beside)

    @cached_property
    def struct(self) -> Layer:
        """Return the layer as the kernels take it."""
        norms = self.input_norm, self.embedding_norm, self.mlp_norm, self.query_norm, self.key_norm
        return layer(
            (self.heads, self.kv_heads, self.head_dim),
            [norm(None) if one is None else one.struct for one in norms],
            [self.qkv.map, self.out.map, self.gate.map, self.up.map, self.down.map],
            normed_residual=self.normed_residual,
        )


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Apply rotary phases to [M, H, hd] in place; cos, sin [M, 1, hd], sin's first half negated."""
    own = kernels(x.dtype, x.device.type)
    if own is not None:
        own.rotate_(x, cos, sin)
        return
    halves_swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(halves_swapped, sin)

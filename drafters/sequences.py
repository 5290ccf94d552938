"""Whole sequences through a target's layers, for training: no cache, no logits."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.lean import LeanModel
from drafters.reference import ReferenceModel
from drafters.tree import causal


def run_sequences(
    model: LeanModel | ReferenceModel,
    ids: Tensor,
    document: Tensor,
    position: Tensor,
    taps: tuple[int, ...],
) -> tuple[Tensor | None, Tensor]:
    """Run whole sequences.

    Args:
        model: whose layers run.
        ids: [B, T] int64.
        document: [B, T] int64; tokens see earlier ones of the same document; -1 is padding.
        position: [B, T] int64 inside the document.
        taps: layers whose raw outputs are wanted.

    Returns:
        Taps [B, T, K * D] or None, and post-norm states [B, T, D].
    """
    rows, length = ids.shape
    unseen = ~causal(length).to(ids.device)
    hidden = (document[:, :, None] != document[:, None, :]) | unseen
    if isinstance(model, ReferenceModel):
        masks = {w: additive_mask(hidden, position, w, model.dtype) for w in set(model.windows)}
        last, tapped = model.full(ids, position, masks, taps)
        return tapped, last
    dtype = model.embedding.dtype
    plain = not bool((hidden ^ unseen).any())
    every = {
        window: None
        if plain and (window is None or length <= window)
        else additive_mask(hidden, position, window, dtype)
        for window in {layer.window for layer in model.layers}
    }

    def attend(mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (
            x.view(rows, length, -1, x.shape[-1]).transpose(1, 2) for x in (query, key, value)
        )
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(rows * length, -1)

    attention = [partial(attend, every[layer.window]) for layer in model.layers]
    last, tapped = model(ids.reshape(-1), position.reshape(-1), attention, taps)
    shaped = (rows, length, -1)
    return None if tapped is None else tapped.view(shaped), last.view(shaped)


def additive_mask(
    hidden: Tensor, position: Tensor, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Return what is added to scores [B, 1, T, T]: hidden [B, T, T], and what a window hides."""
    if window is not None:
        hidden = hidden | (position[:, :, None] - position[:, None, :] >= window)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]

"""The training-time test: a drafter trained on its own guesses, all tokens at once.

At step 0 a token reads earlier tokens of its document. At step j it reads the same keys and, beside
them, the keys that it made itself at steps 1..j: the mask [causal | I | .. | I], which is what a
cache holds while decoding. Memory is linear in the length: documents become rows of their own, so
plain causality is all the mask there is, and no [T, T] matrix exists.
Source: EAGLE-3 (Li et al. 2025, section 3.2).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.alignment import useful_slots
from drafters.base import Batch
from drafters.layers import Rotary
from drafters.recurrent import Recurrence
from drafters.target import Target

_ALIGNED = 8  # channels that fused kernels of accelerators want head widths to be a multiple of


class Documents:
    """The documents of a batch as rows of their own, each from its first token on.

    Args:
        document: [B, T] int64; equal values of a row belong together, -1 is padding.
    """

    def __init__(self, document: Tensor) -> None:
        """Find where every token goes; nowhere else where each row is one document already."""
        self.shape = document.shape
        self.source: Tensor | None = None
        rows, length = document.shape
        change = torch.ones_like(document, dtype=torch.bool)
        change[:, 1:] = document[:, 1:] != document[:, :-1]
        padded = document < 0
        if not bool((change[:, 1:] & ~padded[:, 1:]).any()) and not bool(padded[:, 0].any()):
            return
        starts = (change & ~padded).flatten().nonzero()[:, 0]
        ends = (change | padded).flatten().nonzero()[:, 0]
        ends = torch.cat((ends, torch.tensor([rows * length], device=ends.device)))
        sizes = ends[torch.searchsorted(ends, starts, right=True)] - starts
        place = torch.arange(int(sizes.max()), device=starts.device)
        inside = place < sizes[:, None]
        self.inside, self.source = inside, (starts[:, None] + place).where(inside, 0)

    def split(self, x: Tensor) -> Tensor:
        """Lay [B, T, ...] out as [documents, longest, ...]; what is beyond an end is never read."""
        return x if self.source is None else x.flatten(0, 1)[self.source]

    def join(self, x: Tensor) -> Tensor:
        """Put [documents, longest, ...] back as [B, T, ...]; padding is zero."""
        if self.source is None:
            return x
        flat = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
        return flat.index_put((self.source[self.inside],), x[self.inside]).view(
            *self.shape, *x.shape[2:]
        )


class UnrolledAttention:
    """The keys and values of one layer over the steps of one batch.

    Args:
        documents: of the batch; one object serves all layers.
    """

    def __init__(self, documents: Documents) -> None:
        """Start before step 0."""
        self.documents = documents
        self.slots: Tensor | None = None
        self.first: tuple[Tensor, Tensor] | None = None
        self.own: list[tuple[Tensor, ...]] = []  # keys and values of steps 1, 2, ..

    def narrow(self, places: Tensor) -> None:
        """Go on with some tokens, from step 1 on.

        Args:
            places: [B, T'] among the tokens that went on so far, all different in a row.
        """
        self.slots = places if self.slots is None else self.slots.gather(1, places)
        index = places[..., None, None]
        self.own = [
            tuple(x.gather(1, index.expand(-1, -1, *x.shape[2:])) for x in pair)
            for pair in self.own
        ]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend at the next step.

        Args:
            query: [B, T', H, hd].
            key: [B, T', Hkv, hd].
            value: [B, T', Hkv, hd].

        Returns:
            [B, T', H * hd].
        """
        if self.first is None:
            self.first = self.documents.split(key), self.documents.split(value)
            out = _causal(self.documents.split(query), *self.first, query.shape[-1])
            return self.documents.join(out).flatten(2)
        self.own.append((key, value))
        return self._with_own_keys(query, *self.first)

    def _with_own_keys(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend to step 0's keys and to each token's own.

        An own key differs from token to token, which a shared list of keys cannot hold. Its score
        can: channel j of the widened queries carries it and a unit key in that channel picks it up.
        Unit values give back the weight that the joint softmax gave it. The unit keys stand before
        all others, where causality lets every token read them, so any fused kernel serves.
        """
        steps, dim, heads = len(self.own), query.shape[-1], keys.shape[2]
        width = steps if query.device.type == "cpu" else -(-steps // _ALIGNED) * _ALIGNED
        own_keys = torch.stack([key for key, _ in self.own], 2)
        own_values = torch.stack([value for _, value in self.own], 2)
        grouped = query.unflatten(2, (heads, -1))
        scores = torch.einsum("bthgd,btjhd->bthgj", grouped, own_keys).flatten(2, 3)
        wide = self._spread(torch.cat((query, F.pad(scores, (0, width - steps))), -1))
        unit = F.pad(torch.eye(steps, width, dtype=keys.dtype, device=keys.device), (dim, 0))
        unit = unit[None, :, None].expand(len(keys), steps, heads, dim + width)
        out = _causal(
            F.pad(self.documents.split(wide), (0, 0, 0, 0, steps, 0)),
            torch.cat((unit, F.pad(keys, (0, width))), 1),
            torch.cat((unit.to(values.dtype), F.pad(values, (0, width))), 1),
            dim,
        )
        out = self._taken(self.documents.join(out[:, steps:]))
        shared, weight = out[..., :dim], out[..., dim : dim + steps]
        weight = weight.unflatten(2, (heads, -1))
        own = torch.einsum("bthgj,btjhd->bthgd", weight, own_values)
        return (shared + own.flatten(2, 3)).flatten(2)

    def _spread(self, x: Tensor) -> Tensor:
        """Put [B, T', ...] in the places of all tokens [B, T, ...]."""
        if self.slots is None:
            return x
        index = self.slots[..., None, None].expand(x.shape)
        return x.new_zeros(*self.documents.shape, *x.shape[2:]).scatter(1, index, x)

    def _taken(self, x: Tensor) -> Tensor:
        """Take the tokens that go on [B, T', ...] of all [B, T, ...]."""
        if self.slots is None:
            return x
        return x.gather(1, self.slots[..., None, None].expand(-1, -1, *x.shape[2:]))


def unroll(
    maps: Recurrence, rotary: Rotary, batch: Batch, target: Target, state: Tensor, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Advance every slot on true tokens and the drafter's own states; gradients flow through all.

    Slot i at step s carries token i + s + 1 at rotary position i + s, and predicts position
    i + s + 1. From step 1 on, slots without a supervised label are left out.

    Args:
        maps: of the drafter.
        rotary: its phases.
        batch: whose tokens are fed.
        target: gives embeddings.
        state: [B, T, D] the true features.
        steps: how many.

    Yields:
        Of every step the slots [B, T'] and their states after it [B, T', D].
    """
    rows, length = batch.ids.shape
    documents = Documents(batch.document)
    attention = [UnrolledAttention(documents) for _ in maps.layers]
    slots = torch.arange(length, device=batch.ids.device).expand(rows, length)
    for step in range(steps):
        if step == 1:
            slots = useful_slots(batch, range(1, steps))
            state = state.gather(1, slots[..., None].expand(-1, -1, state.shape[-1]))
            for layer in attention:
                layer.narrow(slots)
        tokens = batch.ids.gather(1, (slots + step + 1).clamp_max(length - 1))
        phases = rotary(batch.position.gather(1, slots) + step, state.dtype)
        embedding = target.embed(tokens).to(state.dtype)
        state = maps.advance(state, embedding, phases, attention)
        yield slots, state


def _causal(query: Tensor, keys: Tensor, values: Tensor, dim: int) -> Tensor:
    """Return [B, T, H, width]; scores are scaled for heads of width `dim`."""
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        is_causal=True,
        scale=dim**-0.5,
        enable_gqa=True,
    )
    return out.transpose(1, 2)

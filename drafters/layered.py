"""LayeredSession: rows of a drafter with attention layers like the target's, and a cache for them.

Owns the cache, the rotary phases and the way from placed tokens to each layer's attention. What is
encoded, and how guesses come of it, belongs to each kind of session.
"""

from typing import Protocol

import torch
from torch import Tensor

from drafters.base import Commit, Features
from drafters.cache import CacheAttention, KVCache
from drafters.growth import Growth
from drafters.layers import Attend, Rotary
from drafters.placement import Placement
from drafters.session import CachedSession, Final
from drafters.shape import TargetShape
from drafters.target import Target


class LayeredDrafter(Protocol):
    """What such a session needs of its drafter."""

    features: Features
    shape: TargetShape
    rotary: Rotary

    @property
    def ids(self) -> Tensor | None:
        """Return the draft vocabulary [K], None for the target's own."""
        ...


class LayeredSession(CachedSession):
    """Rows drafted for by one drafter with attention layers.

    Args:
        drafter: whose sizes count; its weights are the subclass's business.
        target: gives embeddings, dtype and device.
        growth: the shape of the trees.
        rows: batch size.
        capacity: final tokens a row may hold.
        layers: of the drafter.
        guesses: cells of a row behind its final tokens.
        ahead: see CachedSession.
    """

    def __init__(
        self,
        drafter: LayeredDrafter,
        target: Target,
        growth: Growth,
        rows: int,
        capacity: int,
        *,
        layers: int,
        guesses: int,
        ahead: int = 0,
    ) -> None:
        """Allocate the cache."""
        cache = KVCache(
            rows,
            capacity + guesses,
            layers=layers,
            heads=drafter.shape.num_kv_heads,
            head_dim=drafter.shape.head_dim,
            dtype=target.dtype,
            device=target.device,
        )
        super().__init__(drafter.features, growth, cache, capacity, ahead)
        self.target = target
        self.ids = None if drafter.ids is None else drafter.ids.to(target.device)
        columns = torch.arange(cache.capacity, device=target.device)
        self.phases = torch.stack(drafter.rotary(columns, target.dtype), 1)

    def final(self, commit: Commit) -> Final:
        """Pair every feature with the token after its own."""
        tokens = torch.cat((commit.inputs[1:], torch.tensor([commit.root])))
        return Final(tokens, commit.last if commit.taps is None else commit.taps)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the target's embeddings [M, D]."""
        return self.target.embed(tokens.to(self.target.device))

    def rotary(self, placement: Placement) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin [M, 1, hd] of placed tokens."""
        cos, sin = self.phases[placement.positions].unbind(1)
        return cos, sin

    def attention(self, placement: Placement) -> list[Attend]:
        """Return every layer's attention of placed tokens."""
        return [CacheAttention(self.cache, i, placement) for i in range(len(self.cache.store))]

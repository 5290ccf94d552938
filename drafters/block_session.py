"""Decoding of block drafters: the context's keys and values are kept, a block lives for one round.

Every round projects the features of what became final, and runs one block a row behind them. All
that the cache keeps is context; a block's own cells are overwritten by the next true features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from drafters.base import Commit
from drafters.correction import CorrectedGuesser, Correction
from drafters.growth import Growth, Guesser
from drafters.layered import LayeredDrafter, LayeredSession
from drafters.layers import DecoderLayer
from drafters.linear import FrozenLinear
from drafters.packed import Attend, PackedLayer, PackedNorm, rotate_
from drafters.parallel import ParallelGuesser
from drafters.placement import Block, Placement, causal_block
from drafters.session import Final
from drafters.target import Target


@dataclass(frozen=True)
class PackedBlock:
    """The frozen maps of a block drafter.

    Args:
        fusion, context_norm: from raw layer outputs to the context.
        keys: from the context to the keys and values of all layers, layer after layer.
        key_norms: of each layer's keys, or None.
        layers: of the block.
        norm, head: from the last states to logits.
        mask: [D] in place of the embedding of an unknown token.
        correction: of a slot's law by the token before it, or None.
    """

    fusion: FrozenLinear
    context_norm: PackedNorm
    keys: FrozenLinear
    key_norms: Sequence[PackedNorm | None]
    layers: Sequence[PackedLayer | DecoderLayer]
    norm: PackedNorm
    head: FrozenLinear
    mask: Tensor
    correction: Correction | None

    def context_keys(
        self, taps: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return every layer's keys and values [M, Hkv, hd] of raw layer outputs [M, K * D]."""
        made = self.keys(self.context_norm(self.fusion(taps)))
        layer = self.layers[0]
        made = made.view(len(taps), len(self.layers), 2, layer.kv_heads, layer.head_dim)
        found: list[tuple[Tensor, Tensor]] = []
        for both, norm in zip(made.unbind(1), self.key_norms, strict=True):
            key, value = both.unbind(1)
            key = key.contiguous() if norm is None else norm(key.contiguous())
            rotate_(key, *rotary)
            found.append((key, value))
        return found

    def run(self, x: Tensor, rotary: tuple[Tensor, Tensor], attention: Sequence[Attend]) -> Tensor:
        """Return the states [M, D] after all layers."""
        for layer, attend in zip(self.layers, attention, strict=True):
            x = layer(x, rotary, attend)
        return x


class FrozenBlocks(LayeredDrafter, Protocol):
    """What a block session needs of its drafter."""

    lead: ClassVar[int]

    @property
    def length(self) -> int:
        """Return the slots of a block."""
        ...

    def frozen(self, dtype: torch.dtype) -> PackedBlock:
        """Return a copy of the maps in this dtype that never changes."""
        ...


class BlockSession(LayeredSession):
    """Rows drafted for by one block drafter.

    Args:
        drafter: its weights are copied; later training does not reach the session.
        target: gives embeddings, dtype and device.
        growth: the shape of the trees.
        rows: batch size.
        capacity: tokens a row may hold.
    """

    def __init__(
        self, drafter: FrozenBlocks, target: Target, growth: Growth, rows: int, capacity: int
    ) -> None:
        """Pack the weights and allocate the cache."""
        self.maps = drafter.frozen(target.dtype)
        layers = len(self.maps.layers)
        super().__init__(
            drafter, target, growth, rows, capacity, layers=layers, guesses=drafter.length
        )
        self.wanted = slice(drafter.lead, drafter.lead + growth.depth)
        slots = torch.arange(drafter.length)
        self.block = Block(slots, torch.ones(len(slots), len(slots), dtype=torch.bool))

    def final(self, commit: Commit) -> Final:
        """Keep the features of the tokens that the target has read."""
        return Final(commit.inputs, commit.taps)

    def encode(self, final: Final, placement: Placement, ends: Tensor, rows: list[int]) -> None:
        """Keep the keys and values of true features; nothing attends yet."""
        assert final.features is not None
        made = self.maps.context_keys(final.features, self.rotary(placement))
        for layer, (key, value) in enumerate(made):
            self.cache.write(layer, key, value, placement)

    def guesser(self, rows: list[int]) -> Guesser:
        """Run a block a row and answer from its slots' laws."""
        roots = torch.tensor([[self.roots[row]] for row in rows], device=self.cache.store.device)
        states = self._states(roots, rows)
        marginals = self.maps.head(states.flatten(0, 1)).view(*states.shape[:2], -1)
        if self.maps.correction is None:
            return ParallelGuesser(marginals, self.ids)
        return CorrectedGuesser(self.maps.correction, marginals, states, roots, self.ids)

    def _states(self, roots: Tensor, rows: list[int]) -> Tensor:
        """Return the post-norm states [depths, R, D] of the slots that the growth asks about."""
        placement = self._place(rows)
        x = self.maps.mask.repeat(len(rows), len(self.block.offset), 1)
        x[:, 0] = self.target.embed(roots[:, 0])
        attention = self.attention(placement)
        out = self.maps.run(x.flatten(0, 1), self.rotary(placement), attention)
        wanted = out.view(x.shape)[:, self.wanted].transpose(0, 1).contiguous()
        return self.maps.norm(wanted.flatten(0, 1)).view(wanted.shape)

    def _place(self, rows: list[int]) -> Placement:
        """Put a block behind each row's context; alone it needs no mask."""
        alone = len(rows) == 1
        block = causal_block(len(self.block.offset)) if alone else self.block
        placed = self.cache.place([block if r in rows else None for r in range(self.cache.rows)])
        return placed.unmasked() if alone else placed

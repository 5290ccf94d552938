"""Decoding of drafters that feed their own state back in place of the target's features.

The slot of token x[i+1] carries the target's feature g[i]; a guessed token carries the state that
guessed it. Owns the cache, the states and the frontier steps; the maps belong to the drafter.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from drafters.frontier import Frontier, FrontierCells
from drafters.growth import Growth
from drafters.layered import LayeredDrafter, LayeredSession
from drafters.layers import Attend
from drafters.placement import Placement
from drafters.session import Final
from drafters.target import Target


class Recurrence(Protocol):
    """The maps of a recurrent drafter."""

    @property
    def layers(self) -> Sequence[Any]:
        """Return the layers; each has an attention of its own."""
        ...

    def fuse(self, read: Tensor, /) -> Tensor:
        """Return features [..., D] of what is read of the target, [..., K * D] or [..., D]."""
        ...

    def advance(
        self,
        state: Tensor,
        embedding: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention: Sequence[Attend],
    ) -> Tensor:
        """Return the next states [..., D]."""
        ...

    def logits(self, state: Tensor) -> Tensor:
        """Return draft logits [..., K]."""
        ...


class RecurrentDrafter(LayeredDrafter, Protocol):
    """What a recurrent session needs of its drafter."""

    def frozen(self, target: Target) -> Recurrence:
        """Return a copy of the maps in the target's dtype that never changes."""
        ...


class RecurrentSession(LayeredSession):
    """Rows drafted for by one recurrent drafter.

    Args:
        drafter: its weights are copied; later training does not reach the session.
        target: gives embeddings, dtype and device.
        growth: the shape of the trees.
        rows: batch size.
        capacity: tokens a row may hold.
    """

    def __init__(
        self, drafter: RecurrentDrafter, target: Target, growth: Growth, rows: int, capacity: int
    ) -> None:
        """Pack the weights and allocate the cache."""
        self.maps = drafter.frozen(target)
        layers = len(self.maps.layers)
        super().__init__(
            drafter, target, growth, rows, capacity, layers=layers, guesses=growth.cells
        )
        size = rows, drafter.shape.hidden_size
        self.states = torch.zeros(size, dtype=target.dtype, device=target.device)

    def encode(self, final: Final, placement: Placement, ends: Tensor, rows: list[int]) -> None:
        """Run pairs of tokens and true features; keep each row's last state."""
        assert final.features is not None
        states = self.run(final.tokens, self.maps.fuse(final.features), placement)
        self.states[rows] = states[ends]

    def guesser(self, rows: list[int]) -> "RecurrentGuesser":
        """Start a round for these rows."""
        return RecurrentGuesser(self, rows)

    def run(self, tokens: Tensor, state: Tensor, placement: Placement) -> Tensor:
        """Run placed tokens [M] with features or states [M, D]; return states [M, D]."""
        attention = self.attention(placement)
        return self.maps.advance(state, self.embed(tokens), self.rotary(placement), attention)


class RecurrentGuesser:
    """One round of a session's rows."""

    def __init__(self, session: RecurrentSession, rows: list[int]) -> None:
        """Start at the roots."""
        self.session = session
        self.ids = session.ids
        self.cells = FrontierCells(session.cache, rows)
        self.states = session.states[rows][:, None]

    def root_logits(self) -> Tensor:
        """Return the logits [R, K] of the token after each root."""
        return self.session.maps.logits(self.states[:, 0])

    def step(self, frontier: Frontier) -> Tensor:
        """Return the logits [R, F, K] of the token after each node."""
        parent = frontier.parent[..., None].expand(-1, -1, self.states.shape[-1])
        above = self.states.gather(1, parent).flatten(0, 1)
        placement = self.cells.place(frontier)
        states = self.session.run(frontier.tokens.flatten(), above, placement)
        self.states = states.view(*frontier.tokens.shape, -1)
        return self.session.maps.logits(self.states)

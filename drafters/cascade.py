"""Decoding of drafters with a module for every depth, each reading what the one before it made.

Module k (from 0) runs the token x[m] with module k - 1's state of x[m-1]; module 0 reads the
target's feature of x[m-1] there. Its state of x[m] guesses x[m+1]. A token at depth d has no true
feature before it, so modules 0..d-1 cannot run it; module d guesses what follows it, and the later
ones run it because deeper tokens read their keys. Beyond the last module that one goes on with its
own states. Owns cache and states; the maps belong to the drafter.
"""

from typing import Protocol

import torch
from torch import Tensor

from drafters.cache import CacheAttention
from drafters.frontier import Frontier, FrontierCells
from drafters.growth import Growth
from drafters.layered import LayeredDrafter, LayeredSession
from drafters.layers import Attend
from drafters.placement import Placement
from drafters.session import Final
from drafters.target import Target


class Cascade(Protocol):
    """The maps of a drafter with a module for every depth."""

    def __len__(self) -> int:
        """Return the number of modules; each has one attention layer."""
        ...

    def advance(
        self,
        module: int,
        state: Tensor,
        embedding: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        """Return a module's states [M, D] of tokens' embeddings and the states before them."""
        ...

    def logits(self, module: int, state: Tensor) -> Tensor:
        """Return draft logits [..., K] of a module's states."""
        ...


class CascadeDrafter(LayeredDrafter, Protocol):
    """What a cascade session needs of its drafter; it reads the target's last state."""

    def frozen(self, target: Target) -> Cascade:
        """Return a copy of the maps in the target's dtype that never changes."""
        ...


class CascadeSession(LayeredSession):
    """Rows drafted for by one such drafter.

    Args:
        drafter: its weights are copied; later training does not reach the session.
        target: gives embeddings, head, dtype and device.
        growth: the shape of the trees; modules deeper than it do not run.
        rows: batch size.
        capacity: tokens a row may hold.
    """

    def __init__(
        self, drafter: CascadeDrafter, target: Target, growth: Growth, rows: int, capacity: int
    ) -> None:
        """Pack the weights and allocate the cache."""
        self.maps = drafter.frozen(target)
        self.modules = min(len(self.maps), growth.depth)
        super().__init__(
            drafter, target, growth, rows, capacity, layers=self.modules, guesses=growth.cells
        )
        size = self.modules, rows, drafter.shape.hidden_size
        self.states = torch.zeros(size, dtype=target.dtype, device=target.device)

    def encode(self, final: Final, placement: Placement, ends: Tensor, rows: list[int]) -> None:
        """Run tokens with true features through all modules; keep each row's last states."""
        assert final.features is not None
        starts = torch.cat((ends.new_zeros(1), ends[:-1] + 1))
        embedding = self.embed(final.tokens)
        state = final.features
        for module in range(self.modules):
            state = self.run(module, embedding, state, placement)
            before = self.states[module, rows]
            self.states[module, rows] = state[ends]
            state = state.roll(1, 0)
            state[starts] = before

    def guesser(self, rows: list[int]) -> "CascadeGuesser":
        """Start a round for these rows."""
        return CascadeGuesser(self, rows)

    def run(self, module: int, embedding: Tensor, state: Tensor, placement: Placement) -> Tensor:
        """Run placed tokens [M] with the states before them [M, D]; return their states.

        A row's first tokens have no state of module - 1 before them: what is computed for their
        `module` columns is never read.
        """
        if module:
            placement = placement.blind_before(module)
        attend = CacheAttention(self.cache, module, placement)
        return self.maps.advance(module, state, embedding, self.rotary(placement), attend)


class CascadeGuesser:
    """One round of a session's rows."""

    def __init__(self, session: CascadeSession, rows: list[int]) -> None:
        """Start at the roots."""
        self.session = session
        self.ids = session.ids
        self.cells = FrontierCells(session.cache, rows)
        self.states: list[Tensor] = [state[:, None] for state in session.states[:, rows]]

    def root_logits(self) -> Tensor:
        """Return the logits [R, K] of the token after each root."""
        return self.session.maps.logits(0, self.states[0][:, 0])

    def step(self, frontier: Frontier) -> Tensor:
        """Return the logits [R, F, K] of the token after each node."""
        session, above = self.session, self._above(frontier)
        placement = self.cells.place(frontier)
        embedding = session.embed(frontier.tokens.flatten())
        last = session.modules - 1
        first = min(frontier.depth, last)
        for module in range(first, session.modules):
            before = above[last if frontier.depth > last else module - 1]
            state = session.run(module, embedding, before, placement)
            self.states[module] = state.view(*frontier.tokens.shape, -1)
        return session.maps.logits(first, self.states[first])

    def _above(self, frontier: Frontier) -> dict[int, Tensor]:
        """Return the states [R * F, D] of each node's parent, by the modules that made them."""
        last = self.session.modules - 1
        made = range(min(frontier.depth - 1, last), last + 1)
        index = frontier.parent[..., None].expand(-1, -1, self.states[0].shape[-1])
        return {module: self.states[module].gather(1, index).flatten(0, 1) for module in made}

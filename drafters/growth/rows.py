"""Rows of a cost-aware growth while their trees grow: scored point masses, or a drawn chain."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafters.growth.ledger import Ledger
from drafters.laws import Laws
from drafters.tree import TokenTree, chain_parents


@dataclass
class ScoredRow:
    """One row's tree of point masses while it grows; places count the nodes below the root."""

    root: int
    tokens: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])  # places; -1: the root
    survivals: list[float] = field(default_factory=list[float])
    confidence: list[float] = field(default_factory=list[float])  # log, along the path
    frontier: list[int] = field(default_factory=lambda: [-1])
    newest: list[int] = field(default_factory=list[int])
    origin: dict[int, int] = field(default_factory=dict[int, int])  # of the newest: parent's index
    above: list[int] = field(default_factory=list[int])  # of the frontier: parents' indices

    def add(
        self, level: int, scores: list[list[float]], tokens: list[list[int]], ledger: Ledger
    ) -> None:
        """Add the children of the frontier: log q and tokens [F, W]."""
        self.newest.clear()
        self.origin.clear()
        for index, parent in enumerate(self.frontier):
            survival = self.survivals[parent] if parent >= 0 else 1.0
            certainty = self.confidence[parent] if parent >= 0 else 0.0
            for value, token in zip(scores[index], tokens[index], strict=True):
                place = len(self.tokens)
                self.newest.append(place)
                self.origin[place] = index
                self.tokens.append(token)
                self.parents.append(parent)
                self.survivals.append(survival * ledger.chance(level, math.exp(value)))
                self.confidence.append(certainty + value)

    def choose(self, width: int) -> None:
        """Make the best of the newest nodes the next frontier."""
        best = sorted(self.newest, key=lambda place: -self.survivals[place])[:width]
        self.frontier, self.above = best, [self.origin[place] for place in best]

    @property
    def frontier_tokens(self) -> list[int]:
        """Return the frontier's tokens."""
        return [self.tokens[place] for place in self.frontier]

    def reach(self) -> float:
        """Return how likely the accepted path runs through the frontier."""
        return sum(self.survivals[place] for place in self.frontier)

    def best(self) -> list[tuple[float, int]]:
        """Return (survival, place) of every node."""
        return [(survival, place) for place, survival in enumerate(self.survivals)]

    def tree(self, places: list[int]) -> TokenTree:
        """Return the tree of these nodes, given in order of creation."""
        number = {-1: 0} | {place: node for node, place in enumerate(places, start=1)}
        return TokenTree(
            torch.tensor([self.root, *(self.tokens[place] for place in places)]),
            torch.tensor([-1, *(number[self.parents[place]] for place in places)]),
            confidence=torch.tensor([0.0, *(self.confidence[place] for place in places)]),
        )


@dataclass
class DrawnRow:
    """One row's drawn chain while it grows; `open` as long as it may have another node."""

    root: int
    survival: float = 1.0
    open: bool = True
    tokens: list[int] = field(default_factory=list[int])
    laws: list[Tensor] = field(default_factory=list[Tensor])
    confidence: list[float] = field(default_factory=lambda: [0.0])  # log, along the path

    @property
    def last(self) -> int:
        """Return the newest token."""
        return self.tokens[-1] if self.tokens else self.root

    def add(self, token: int, survival: float, mode: float, law: Tensor) -> None:
        """Add a token drawn from a law [K]; its confidence is the law's mode, not the token's."""
        self.tokens.append(token)
        self.laws.append(law)
        self.survival = survival
        self.confidence.append(self.confidence[-1] + math.log(mode))

    def tree(self, ids: Tensor | None) -> TokenTree:
        """Return the chain with the laws that it was drawn from."""
        count = len(self.tokens)
        laws = Laws(torch.stack(self.laws), ids, torch.arange(count)) if count else None
        tokens = torch.tensor([self.root, *self.tokens])
        return TokenTree(tokens, chain_parents(count + 1), laws, torch.tensor(self.confidence))

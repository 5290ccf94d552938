"""`none`: plain decoding. Its tree is the root alone; every speed-up is measured against it."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from drafters.base import Commit, Features
from drafters.growth import Growth
from drafters.options import no_options
from drafters.registry import register
from drafters.sampling import RowRandom, Warp
from drafters.shape import TargetShape
from drafters.target import Target
from drafters.tree import TokenTree, chain_parents


@register
class NoDrafter:
    """Proposes nothing."""

    name: ClassVar[str] = "none"
    features = Features()

    @classmethod
    def build(cls, options: Mapping[str, object], shape: TargetShape) -> "NoDrafter":
        """Make one; it has no options."""
        no_options(cls.name, options)
        return cls()

    def options(self) -> dict[str, object]:
        """Return that there are none."""
        return {}

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "NoSession":
        """Start a session; the growth is not asked."""
        return NoSession(rows)


class NoSession:
    """Remembers each row's root."""

    features = Features()

    def __init__(self, rows: int) -> None:
        """Start without roots."""
        self.roots = torch.zeros(rows, dtype=torch.int64)

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Take the new roots."""
        for row, commit in enumerate(commits):
            if commit is not None:
                self.roots[row] = commit.root

    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        """Propose the root alone."""
        parent = chain_parents(1)
        tokens = self.roots.clone()
        return [
            None if coins is None else TokenTree(tokens[row : row + 1], parent)
            for row, coins in enumerate(random)
        ]

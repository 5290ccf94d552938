"""`self_window`: the target drafts for itself, seeing only the first and the latest tokens.

Attention sinks and a sliding window over what the target has cached; the weights are all read, so
a level costs a pass over a short text. That pays where reading the cache is most of a pass: long
texts, many rows. Nothing is written to the target's cache. Source: StreamingLLM (Xiao et al. 2024,
arXiv 2309.17453) for sinks and window, MagicDec (Sadhukhan et al. 2024, arXiv 2408.11049) for
drafting so.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from drafters.base import Commit, Features
from drafters.cache import KVCache
from drafters.errors import UserError
from drafters.frontier import Frontier
from drafters.growth import Growth
from drafters.options import checked
from drafters.registry import register
from drafters.sampling import RowRandom, Warp
from drafters.session import by_row
from drafters.shape import TargetShape
from drafters.sliding import SlidingCache
from drafters.target import Target
from drafters.tree import TokenTree


@register
class SelfWindowDrafter:
    """The target with a short memory.

    Args:
        sinks: tokens kept from the start of the text.
        window: tokens kept from its end.

    Raises:
        UserError: if the window is empty.
    """

    name: ClassVar[str] = "self_window"
    features = Features()

    def __init__(self, sinks: int = 4, window: int = 256) -> None:
        """Check and keep the sizes."""
        if sinks < 0 or window < 1:
            raise UserError(
                f"{self.name}: sinks is {sinks}, window {window}: give 0 or more, 1 or more"
            )
        self.sinks, self.window = sinks, window

    @classmethod
    def build(cls, options: Mapping[str, object], shape: TargetShape) -> "SelfWindowDrafter":
        """Make one from its options."""
        return cls(**checked(cls.name, options, {"sinks": int, "window": int}))

    def options(self) -> dict[str, object]:
        """Return the sizes."""
        return {"sinks": self.sinks, "window": self.window}

    def start(
        self, target: Target, growth: Growth, rows: int, capacity: int
    ) -> "SelfWindowSession":
        """Start a session; it drafts once it is shown the target's cache."""
        return SelfWindowSession(self, target, growth, rows)


class SelfWindowSession:
    """Rows that the target drafts for over a window of its own cache."""

    features = Features()

    def __init__(
        self, drafter: SelfWindowDrafter, target: Target, growth: Growth, rows: int
    ) -> None:
        """Start without a cache."""
        self.drafter, self.target, self.growth = drafter, target, growth
        self.roots = [0] * rows
        self.view: SlidingCache | None = None

    def read_cache(self, cache: KVCache) -> None:
        """Take the target's cache: its committed tokens are read from now on."""
        sizes = self.drafter.sinks, self.drafter.window, 1 + self.growth.cells
        self.view = SlidingCache(cache, *sizes)

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Take the new roots; what was committed is copied when it is needed."""
        assert self.view is not None
        for row, commit in enumerate(commits):
            if commit is None:
                continue
            self.roots[row] = commit.root
            if commit.tree is None:
                self.view.forget(row)

    @torch.inference_mode()
    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        """Run the target over the window; the root alone where positions run out."""
        assert self.view is not None
        last = self.target.shape.max_positions - self.growth.depth
        lengths = self.view.source.lengths.tolist()
        coins = {r: x.draft for r, x in enumerate(random) if x is not None and lengths[r] <= last}
        trees: list[TokenTree] = []
        if coins:
            rows = list(coins)
            self.view.refresh(rows)
            roots = [self.roots[row] for row in rows]
            guesser = warp.guide(SelfWindowGuesser(self.target, self.view, rows, roots), rows)
            trees = self.growth.grow(roots, guesser, warp, list(coins.values()))
        return by_row(dict(zip(coins, trees, strict=True)), self.roots, random)


class SelfWindowGuesser:
    """One round of a session's rows; the root is its first frontier."""

    ids = None

    def __init__(
        self, target: Target, view: SlidingCache, rows: list[int], roots: Sequence[int]
    ) -> None:
        """Run the roots."""
        self.target, self.cache, self.cells = target, view.cache, view.cells(rows)
        tokens = torch.tensor(roots, device=target.device)[:, None]
        self.first = self._run(Frontier(tokens, torch.zeros_like(tokens), 1))[:, 0]

    def root_logits(self) -> Tensor:
        """Return the logits [R, V] of the token after each root."""
        return self.first

    def step(self, frontier: Frontier) -> Tensor:
        """Return the logits [R, F, V] of the token after each node."""
        return self._run(Frontier(frontier.tokens, frontier.parent, frontier.depth + 1))

    def _run(self, frontier: Frontier) -> Tensor:
        placement = self.cells.place(frontier)
        tokens = frontier.tokens.flatten()
        logits, _, _ = self.target.forward(tokens, placement, self.cache, Features())
        return logits.view(*frontier.tokens.shape, -1)

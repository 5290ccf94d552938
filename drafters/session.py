"""Sessions of drafters with a cache of their own, and the way from committed tokens to trees.

A session stores what became final and encodes it when it is next asked for a proposal, so rounds
without a proposal lose nothing. Guesses lie behind the committed part of the cache and are
overwritten by the next true tokens. What a token's encoding is belongs to each drafter.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.base import Commit, Features
from drafters.cache import KVCache
from drafters.growth import Growth, Guesser
from drafters.placement import Placement, causal_block
from drafters.sampling import RowRandom, Warp
from drafters.tree import TokenTree

_CHUNK = 512  # tokens of a row encoded at once: bounds the mask of a long prompt


class Final(NamedTuple):
    """Final tokens that a drafter has yet to encode: [m] int64, and features [m, F] or None."""

    tokens: Tensor
    features: Tensor | None


class CachedSession(ABC):
    """Rows that share one cache of the drafter's own.

    Args:
        features: what the drafter reads from the target.
        growth: the shape of the trees.
        cache: the drafter's; holds `room` final tokens a row and growth.cells guesses.
        room: final tokens a row can encode; a row beyond it proposes nothing any more.
        ahead: guesses of a row that run together with its last final tokens, behind them.
    """

    def __init__(
        self, features: Features, growth: Growth, cache: KVCache, room: int, ahead: int = 0
    ) -> None:
        """Start without sequences."""
        self.ahead = ahead
        self.features, self.growth, self.cache, self.room = features, growth, cache, room
        self.roots = [0] * cache.rows
        self._waiting: list[list[Final]] = [[] for _ in range(cache.rows)]
        self._full: set[int] = set()
        self._warned = False

    @abstractmethod
    def final(self, commit: Commit) -> Final:
        """Return what a commit adds to the tokens that can be encoded."""

    @abstractmethod
    def encode(self, final: Final, placement: Placement, ends: Tensor, rows: list[int]) -> None:
        """Run final tokens, row after row, and keep what each row's last one gave.

        Args:
            final: [M] tokens of all rows.
            placement: of these tokens, and of `ahead` more behind those that end a row's.
            ends: index of the last token of each row.
            rows: the rows, ascending.
        """

    @abstractmethod
    def guesser(self, rows: list[int]) -> Guesser:
        """Return what a growth policy asks; all final tokens of these rows are encoded."""

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Note what became final; a prefill starts its row afresh."""
        for row, commit in enumerate(commits):
            if commit is None:
                continue
            if commit.tree is None:
                self.restart(row)
            self.roots[row] = commit.root
            self.add(row, self.final(commit))

    def restart(self, row: int) -> None:
        """Empty a row for its next sequence."""
        self._full.discard(row)
        self.rewind(row, 0)

    def rewind(self, row: int, length: int) -> None:
        """Forget what a row holds beyond its first `length` tokens, and what waits."""
        self._waiting[row].clear()
        self.cache.lengths[row] = length

    def add(self, row: int, final: Final) -> None:
        """Let final tokens of a row wait to be encoded."""
        if row not in self._full:
            self._waiting[row].append(final)

    @torch.inference_mode()
    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        """Encode what waits and grow a tree a row; the root alone where the context is full."""
        coins = {row: x.draft for row, x in enumerate(random) if x and self._has_room(row)}
        trees: list[TokenTree] = []
        if coins:
            rows = list(coins)
            self._encode(rows)
            roots = [self.roots[row] for row in rows]
            guesser = warp.guide(self.guesser(rows), rows)
            trees = self.growth.grow(roots, guesser, warp, list(coins.values()))
        return by_row(dict(zip(coins, trees, strict=True)), self.roots, random)

    def _has_room(self, row: int) -> bool:
        if row in self._full:
            return False
        waiting = sum(len(final.tokens) for final in self._waiting[row])
        if int(self.cache.lengths[row]) + waiting <= self.room:
            return True
        self._waiting[row].clear()
        self._full.add(row)
        if not self._warned:
            warnings.warn(
                f"a text outgrew the drafter's context of {self.room} tokens: it goes on without "
                "drafts",
                stacklevel=3,
            )
            self._warned = True
        return False

    def _encode(self, rows: list[int]) -> None:
        """Run the waiting tokens of these rows, a chunk of each at a time."""
        waiting = {row: _joined(self._waiting[row]) for row in rows if self._waiting[row]}
        longest = max((len(final.tokens) for final in waiting.values()), default=0)
        for start in range(0, longest, _CHUNK):
            span = slice(start, start + _CHUNK)
            pieces = {r: _cut(f, span) for r, f in waiting.items() if len(f.tokens) > start}
            counts = [len(pieces[r].tokens) if r in pieces else 0 for r in range(self.cache.rows)]
            more = {r for r in pieces if len(waiting[r].tokens) <= start + _CHUNK}
            blocks = [n + self.ahead * (row in more) for row, n in enumerate(counts)]
            placement = self.cache.place([causal_block(n) if n else None for n in blocks])
            ends = torch.tensor([n for n in counts if n]).cumsum(0) - 1
            self.encode(_joined(list(pieces.values())), placement, ends, list(pieces))
            self.cache.advance(counts)
        for row in waiting:
            self._waiting[row].clear()


def _joined(parts: list[Final]) -> Final:
    if len(parts) == 1:
        return parts[0]
    features = [part.features for part in parts if part.features is not None]
    tokens = torch.cat([part.tokens for part in parts])
    return Final(tokens, torch.cat(features) if features else None)


def _cut(final: Final, span: slice) -> Final:
    return Final(final.tokens[span], None if final.features is None else final.features[span])


def by_row(
    trees: Mapping[int, TokenTree], roots: Sequence[int], random: Sequence[RowRandom | None]
) -> list[TokenTree | None]:
    """Lay trees out by row; rows with a generator but no tree get the root alone, the rest None."""
    return [
        None if coins is None else trees.get(row) or TokenTree.chain([roots[row]])
        for row, coins in enumerate(random)
    ]

"""`suffix`: what followed the longest ends of the text before, weighed by how often it did.

Every row remembers its own text; a session may remember finished answers for all its rows. The
length of a match says how much to draft, and of several lengths the one that promises most accepted
tokens is taken. Proposals are point masses. Source: Oliaro et al. 2024 (SuffixDecoding, arXiv
2411.04975), section 3; counts are taken over the latest occurrences of an end.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from typing import ClassVar

import torch

from drafters.base import Commit, Features
from drafters.errors import UserError
from drafters.growth import Growth
from drafters.occurrences import Match, Occurrences
from drafters.options import fill_options
from drafters.registry import register
from drafters.sampling import RowRandom, Warp
from drafters.shape import TargetShape
from drafters.target import Target
from drafters.tree import TokenTree


@dataclass
class SuffixOptions:
    """Options of `suffix`.

    Args:
        factor: drafted tokens at most, for every token of a match.
        min_prob: share of the counts below which nothing more is drafted along a path.
        reach: tokens of the text that a match is compared over.
        occurrences: places of an end that are counted, the latest ones.
        corpus: tokens of finished answers that a session remembers for all rows, the oldest leave
            first; 0: none. Then what is drafted depends on the answers before: a benchmark that
            repeats its prompts would find its own answers.
    """

    factor: float = 1.0
    min_prob: float = 0.1
    reach: int = 64
    occurrences: int = 32
    corpus: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.factor <= 0 or not 0 < self.min_prob <= 1:
            raise UserError(
                f"factor is {self.factor}, min_prob {self.min_prob}: give more than 0, and "
                "min_prob up to 1"
            )
        if self.reach < 1 or self.occurrences < 1 or self.corpus < 0:
            raise UserError(
                f"reach is {self.reach}, occurrences {self.occurrences}, corpus {self.corpus}: "
                "give 1 or more, corpus 0 or more"
            )


@register
class SuffixDrafter:
    """Suffix decoding.

    Args:
        config: its options.
    """

    name: ClassVar[str] = "suffix"
    features = Features()

    def __init__(self, config: SuffixOptions) -> None:
        """Keep the options."""
        self.config = config

    @classmethod
    def build(cls, options: Mapping[str, object], shape: TargetShape) -> "SuffixDrafter":
        """Make one from its options; see SuffixOptions."""
        return cls(fill_options(cls.name, SuffixOptions, options))

    def options(self) -> dict[str, object]:
        """Return the options."""
        return asdict(self.config)

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "SuffixSession":
        """Start a session; the growth gives levels, nodes and whether there are branches."""
        return SuffixSession(self.config, growth, rows)


class SuffixSession:
    """An index a row, and one of finished answers for all."""

    features = Features()

    def __init__(self, config: SuffixOptions, growth: Growth, rows: int) -> None:
        """Start without texts."""
        self.config, self.growth = config, growth
        self.own = [Occurrences() for _ in range(rows)]
        self.answers: list[list[int]] = [[] for _ in range(rows)]
        self.corpus = Occurrences(config.corpus)

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Extend each row's text; a prefill starts it afresh, a finished answer is remembered."""
        for row, commit in enumerate(commits):
            if commit is None:
                continue
            if commit.tree is None:
                self.own[row], self.answers[row] = Occurrences(), []
                self.own[row].begin()
                self.own[row].extend(commit.inputs.tolist())
            self.own[row].extend(commit.emitted)
            self.answers[row] += commit.emitted
            if commit.finished and self.config.corpus:
                self.corpus.begin()
                self.corpus.extend(self.answers[row])

    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        """Propose the better of what both indices say; the root alone where nothing matches."""
        return [None if coins is None else self._tree(row) for row, coins in enumerate(random)]

    def _tree(self, row: int) -> TokenTree:
        text, config = self.own[row].documents[0], self.config
        found = [
            best_guess(index.matches(text, config.occurrences, config.reach), config, self.growth)
            for index in (self.own[row], self.corpus)
        ]
        return max(found, key=lambda guess: guess.score).tree(text[-1])


@dataclass
class Guess:
    """A tree of tokens that followed matches: each node's parent (-1: the root) and share.

    Args:
        length: of the matches.
        shares: of the counts, along the path from the root.
    """

    length: int = 0
    tokens: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    shares: list[float] = field(default_factory=list[float])

    @property
    def score(self) -> float:
        """Return how many tokens would be accepted if the text went on as it did."""
        return sum(self.shares)

    def tree(self, root: int) -> TokenTree:
        """Return the tree; a short match makes a drafter less sure than its counts."""
        sure, paths = self.length / (self.length + 1), [0.0]
        for parent, share in zip(self.parents, self.shares, strict=True):
            above = self.shares[parent] if parent >= 0 else 1.0
            paths.append(paths[parent + 1] + math.log(sure * share / above))
        parents = [-1, *(parent + 1 for parent in self.parents)]
        return TokenTree(
            torch.tensor([root, *self.tokens]),
            torch.tensor(parents),
            confidence=torch.tensor(paths),
        )


def best_guess(matches: Sequence[Match], config: SuffixOptions, growth: Growth) -> Guess:
    """Return the guess of the match length that promises most; of equals the longest's.

    Among the lengths at which the same places match, the longest may draft most, so only the
    lengths of the matches themselves are tried.
    """
    best = Guess()
    for length in sorted({match.length for match in matches}, reverse=True):
        most = min(growth.nodes, math.floor(config.factor * length + 1e-6))
        found = [m.next(growth.levels) for m in matches if m.length >= length]
        guess = _likeliest(found, length, most, config.min_prob, growth.expanded > 1)
        best = guess if guess.score > best.score else best
    return best


def _likeliest(
    paths: Sequence[Sequence[int]], length: int, most: int, least: float, branches: bool
) -> Guess:
    """Return the likeliest prefixes of these paths, by their share of the counts.

    Args:
        paths: what followed, one an occurrence, the latest first: of equals it stays first.
        length: of the match.
        most: nodes at most.
        least: share at least.
        branches: whether a node may have several children.
    """
    guess = Guess(length)
    heap: list[tuple[float, int, int, list[Sequence[int]], int, int]] = []
    created = 0

    def push(below: Sequence[Sequence[int]], depth: int, parent: int, share: float) -> None:
        nonlocal created
        groups: dict[int, list[Sequence[int]]] = {}
        for path in below:
            if len(path) > depth:
                groups.setdefault(path[depth], []).append(path)
        ranked = sorted(groups.items(), key=lambda group: -len(group[1]))
        for token, group in ranked if branches else ranked[:1]:
            created += 1
            part = share * len(group) / len(below)
            heappush(heap, (-part, created, token, group, depth, parent))

    push(paths, 0, -1, 1.0)
    while heap and len(guess.tokens) < most and -heap[0][0] >= least:
        negative, _, token, group, depth, parent = heappop(heap)
        guess.tokens.append(token)
        guess.parents.append(parent)
        guess.shares.append(-negative)
        push(group, depth + 1, len(guess.tokens) - 1, -negative)
    return guess

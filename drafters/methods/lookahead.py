"""`lookahead`: the target's own passes refine guesses of many coming tokens at once.

A window of W columns and n - 1 rows of guesses goes along in every pass: the first row is a chain
below the root, the later rows hang below it, one guess a row. The pass says what follows each
column, which makes an n-gram; n-grams that begin with the root are drafted. Column c of row r sees
the root, the first row up to c and its own column's rows up to r, so window and n-grams are paths
of one token tree: the engine judges a window's nodes as it judges any point mass. Source: Fu et al.
2024 (Lookahead decoding, arXiv 2402.02057), section 3; columns move on by what was accepted here.
"""

# torch leaves tolist untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from drafters.base import Commit, Features
from drafters.errors import UserError
from drafters.growth import Growth
from drafters.options import checked
from drafters.registry import register
from drafters.sampling import RowRandom, Warp
from drafters.shape import TargetShape
from drafters.target import Target
from drafters.tree import TokenTree


@register
class LookaheadDrafter:
    """Lookahead decoding.

    Args:
        ngram: length of the n-grams that a window makes; its columns are that many guesses long,
            less one.
        candidates: n-grams kept of every first token, the latest.

    Raises:
        UserError: if an n-gram could not say anything, or none is kept.
    """

    name: ClassVar[str] = "lookahead"
    features = Features()

    def __init__(self, ngram: int = 3, candidates: int = 5) -> None:
        """Check and keep the sizes."""
        if ngram < 2 or candidates < 1:
            raise UserError(
                f"{self.name}: ngram is {ngram}, candidates {candidates}: give 2 or more, 1 or more"
            )
        self.ngram, self.candidates = ngram, candidates

    @classmethod
    def build(cls, options: Mapping[str, object], shape: TargetShape) -> "LookaheadDrafter":
        """Make one from its options."""
        return cls(**checked(cls.name, options, {"ngram": int, "candidates": int}))

    def options(self) -> dict[str, object]:
        """Return the sizes."""
        return {"ngram": self.ngram, "candidates": self.candidates}

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "LookaheadSession":
        """Start a session; the growth's nodes are shared by window and n-grams."""
        return LookaheadSession(self, growth, rows)


class Window:
    """One row's guesses and its pool of n-grams.

    Args:
        columns: guesses by column; guess r of column c is for the token r + c + 1 behind the root.
        pool: n-grams by first token, without it; the latest last.
    """

    def __init__(self, width: int, ngram: int, keep: int, text: Sequence[int]) -> None:
        """Guess that the text goes on as it began: a guess is needed, any will do."""
        self.keep = keep
        self.columns = [
            [text[(row + column) % len(text)] for row in range(ngram - 1)]
            for column in range(width)
        ]
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}

    def path(self, column: int) -> list[int]:
        """Return the first row up to a column, and the column's later rows."""
        first = [guesses[0] for guesses in self.columns[: column + 1]]
        return first + self.columns[column][1:]

    def candidates(self, root: int) -> list[tuple[int, ...]]:
        """Return what followed this token, the latest first."""
        return list(self.pool.get(root, {}))[::-1]

    def refine(self, following: Mapping[int, int], emitted: int) -> None:
        """Take in what follows each column's path, and move on by what was emitted.

        Args:
            following: token by column.
            emitted: tokens of the round; columns behind the new root are guesses anew.
        """
        for column, token in following.items():
            guesses = self.columns[column]
            self._remember(guesses[0], (*guesses[1:], token))
            self.columns[column] = [*guesses[1:], token]
        past = (emitted - 1) % len(self.columns)
        self.columns = self.columns[past:] + self.columns[:past]

    def _remember(self, first: int, rest: tuple[int, ...]) -> None:
        kept = self.pool.setdefault(first, {})
        kept.pop(rest, None)
        kept[rest] = None
        if len(kept) > self.keep:
            del kept[next(iter(kept))]


class LookaheadSession:
    """One window a row."""

    features = Features()

    def __init__(self, drafter: LookaheadDrafter, growth: Growth, rows: int) -> None:
        """Start without texts."""
        self.drafter, self.growth = drafter, growth
        self.width = max(1, growth.depth - drafter.ngram + 2)
        self.roots = [0] * rows
        self.windows = [self._window([0]) for _ in range(rows)]
        self.submitted = [0] * rows  # columns of the round under way

    def _window(self, text: Sequence[int]) -> Window:
        return Window(self.width, self.drafter.ngram, self.drafter.candidates, text)

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Read off every column what the target says next; a prefill starts a row afresh."""
        for row, commit in enumerate(commits):
            if commit is None:
                continue
            self.roots[row] = commit.root
            if commit.tree is None:
                self.windows[row] = self._window(commit.inputs.tolist())
            elif commit.logits is not None:
                window, columns = self.windows[row], range(self.submitted[row])
                ends = {column: _end(commit.tree, window.path(column)) for column in columns}
                found = {column: end for column, end in ends.items() if end is not None}
                window.refine(_best(commit.logits, found), len(commit.emitted))
            self.submitted[row] = 0

    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        """Propose n-grams on half of the nodes, the window on what they leave."""
        return [None if coins is None else self._tree(row) for row, coins in enumerate(random)]

    def _tree(self, row: int) -> TokenTree:
        window, root, nodes = self.windows[row], self.roots[row], self.growth.nodes
        paths: list[Sequence[int]] = []
        known: set[tuple[int, ...]] = set()
        for path in window.candidates(root):
            _add(path, paths, known, nodes // 2)
        for column in range(self.width):
            if not _add(window.path(column), paths, known, nodes):
                break
            self.submitted[row] = column + 1
        return TokenTree.from_paths(root, paths)


def _add(
    path: Sequence[int], paths: list[Sequence[int]], known: set[tuple[int, ...]], most: int
) -> bool:
    """Add a path if all its nodes fit among so many."""
    nodes = {tuple(path[: depth + 1]) for depth in range(len(path))}
    if len(known | nodes) > most:
        return False
    known |= nodes
    paths.append(path)
    return True


def _end(tree: TokenTree, path: Sequence[int]) -> int | None:
    """Return the node that a path ends at; None if the tree was cut above it."""
    node: int | None = 0
    for token in path:
        node = tree.child(node, token)
        if node is None:
            return None
    return node


def _best(logits: Tensor, nodes: Mapping[int, int]) -> dict[int, int]:
    """Return the likeliest token after each node, by column."""
    if not nodes:
        return {}
    tokens = logits[list(nodes.values())].max(-1).indices.tolist()
    return dict(zip(nodes, tokens, strict=True))

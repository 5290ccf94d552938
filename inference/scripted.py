"""A drafter whose acceptance is given: what drafting would bring, before anything is trained.

It is told what comes next and goes wrong at each depth with a given chance. It costs next to
nothing, so its speed-up is what an ideal drafter of that alpha could reach.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from drafters.base import Commit, Features
from drafters.growth import Growth
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from drafters.tree import TokenTree

Follow = Callable[[Sequence[int], int], list[int]]
"""(a row's tokens so far, n) -> the n tokens that plain decoding adds."""


class ScriptedDrafter:
    """Drafts right tokens with a given chance a depth; a point mass at every node.

    Args:
        follow: knows what comes next.
        alpha: chance that a depth holds the right token.
        vocab_size: to make a wrong token of a right one.
        siblings: wrong nodes beside each, elder than it.
    """

    name: ClassVar[str] = "scripted"
    features = Features()

    def __init__(self, follow: Follow, alpha: float, vocab_size: int, siblings: int = 0) -> None:
        """Keep the script."""
        self.follow, self.alpha, self.vocab_size = follow, alpha, vocab_size
        self.siblings = siblings

    def options(self) -> Mapping[str, object]:
        """Return what tells two of them apart."""
        return {"alpha": self.alpha, "siblings": self.siblings}

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "ScriptedSession":
        """Start a session; of the growth its depth counts."""
        return ScriptedSession(self, growth.depth, rows)


class ScriptedSession:
    """Knows the tokens of every row.

    Args:
        drafter: whose script is followed.
        depth: of its trees.
        rows: batch size.
    """

    features = Features()

    def __init__(self, drafter: ScriptedDrafter, depth: int, rows: int) -> None:
        """Start without sequences."""
        self.drafter, self.depth = drafter, depth
        self.ids: list[list[int]] = [[] for _ in range(rows)]

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Take in what became final."""
        for row, commit in enumerate(commits):
            if commit is None:
                continue
            if commit.tree is None:
                self.ids[row] = commit.inputs.tolist()
            self.ids[row] += commit.emitted

    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        """Propose the next tokens, a wrong one from the first depth on that a coin refuses."""
        return [
            None if coins is None else self._tree(self.ids[row], coins)
            for row, coins in enumerate(random)
        ]

    def _tree(self, ids: Sequence[int], coins: RowRandom) -> TokenTree:
        script, size = self.drafter, self.drafter.vocab_size
        tokens, parent, node, right = [ids[-1]], [-1], 0, True
        for token in script.follow(ids, self.depth):
            right = right and coins.draft.accept(script.alpha)
            elder = [(token + 2 + i) % size for i in range(script.siblings)]
            tokens += [*elder, token if right else (token + 1) % size]
            parent += [node] * (len(elder) + 1)
            node = len(tokens) - 1
        return TokenTree(torch.tensor(tokens), torch.tensor(parent))

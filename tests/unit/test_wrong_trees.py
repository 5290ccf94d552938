"""A drafter's own mistakes never change an output: a tree that could is refused in a line."""

from collections.abc import Callable, Sequence

import pytest
import torch

from drafters.base import Commit, Features
from drafters.errors import UserError
from drafters.growth import Chain, Growth
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from drafters.tree import TokenTree
from inference import generate
from tests.tiny import prompts_of, tiny_target

Propose = Callable[[list[int]], list[TokenTree | None]]


class Newcomer:
    """A drafter, and its session, that proposes whatever a function of the roots makes."""

    name = "newcomer"
    features = Features()

    def __init__(self, proposes: Propose) -> None:
        self.proposes, self.roots = proposes, [0]

    def options(self) -> dict[str, object]:
        return {}

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "Newcomer":
        self.roots = [0] * rows
        return self

    def observe(self, commits: Sequence[Commit | None]) -> None:
        for row, commit in enumerate(commits):
            self.roots[row] = self.roots[row] if commit is None else commit.root

    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        return self.proposes(self.roots)


def _tree(tokens: list[int], parents: list[int]) -> TokenTree:
    return TokenTree(torch.tensor(tokens), torch.tensor(parents))


@pytest.mark.parametrize(
    ("proposes", "said"),
    [
        (lambda roots: [TokenTree.chain([(roots[0] + 1) % 128, 5])], "starts with token"),
        (lambda roots: [_tree([roots[0], 3, 4], [-1, 2, 0])], "row 0: node 1 has parent 2"),
        (lambda roots: [_tree([roots[0], 3, 4], [-1, -1, 1])], "row 0: node 1 has parent -1"),
        (lambda _: [None], "no tree for row 0"),
        (lambda _: [], "0 trees"),
        (lambda _: None, "proposes None: give a list"),
        (lambda _: ["ab"], "proposes 'ab' for row 0: give a TokenTree"),
    ],
    ids=["root", "order", "two roots", "no tree", "no rows", "nothing", "a text"],
)
def test_a_wrong_tree_is_refused(proposes: Propose, said: str) -> None:
    with pytest.raises(UserError, match=said):
        generate(
            tiny_target(), Newcomer(proposes), prompts_of(5), growth=Chain(2), max_new_tokens=8
        )


def test_a_wrong_guess_is_not() -> None:
    target = tiny_target()
    guesses = Newcomer(lambda roots: [_tree([roots[0], 3, 4, 5], [-1, 0, 0, 1])])
    nothing = Newcomer(lambda roots: [TokenTree.chain(roots)])
    texts = [
        generate(target, one, prompts_of(5), growth=Chain(2), max_new_tokens=8)[0].ids
        for one in (guesses, nothing)
    ]
    assert texts[0] == texts[1]

"""Merged trees, drawn nodes beside point masses, emit the target's law: by enumeration."""

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch

from drafters.growth import Chain
from drafters.laws import Law, Laws
from drafters.merge import merge
from drafters.methods.hybrid import choose
from drafters.survival import Survival
from drafters.tree import TokenTree
from inference.verify import Verifier, block, lossless, traversal
from tests.exact import WalkingCoin, drawn_tree, fractions, is_exact, judged_law, mean_length
from tests.property.test_exact_laws import DRAFTER, TARGET, by_length, every

Part = Callable[[WalkingCoin], TokenTree]
F = Fraction


def merged_law(verify: Verifier, p: np.ndarray, parts: Sequence[Part]) -> dict:
    """Return the law of a round whose tree is merged of drawn and fixed ones."""

    def draw(coin: WalkingCoin) -> TokenTree:
        return merge([part(coin) for part in parts])[0]

    return judged_law(verify, p, draw)


def drawn_part(branching: Sequence[int]) -> Part:
    return lambda coin: drawn_tree(DRAFTER, branching, coin, distinct=True)


def fixed_part(*paths: Sequence[int]) -> Part:
    return lambda coin: TokenTree.from_paths(0, paths)


@pytest.mark.parametrize("verify", [lossless, block, traversal])
@pytest.mark.parametrize(
    "parts",
    [
        [drawn_part((1, 1)), fixed_part([0, 1], [2])],
        [fixed_part([1, 1], [1, 2]), drawn_part((1, 1))],
        [drawn_part((1,)), drawn_part((1,)), fixed_part([0], [1, 0])],
        [drawn_part((2,)), fixed_part([2, 2]), drawn_part((1, 1))],
    ],
)
def test_merged_trees_are_exact(verify: Verifier, parts: list[Part]) -> None:
    """Drawn chains and trees beside point masses, equal tokens and shared paths among them."""
    assert is_exact(merged_law(verify, TARGET, parts), TARGET, 3)


def test_a_point_mass_takes_what_a_drawn_sibling_leaves() -> None:
    """p = (5, 3, 2)/10, q = (1, 1, 2)/4 and token 1: sum min(p, q) = 7/10, and 3 - 2.5 more."""
    p, q = every([5, 3, 2]), fractions([1, 1, 2])

    def draw(coin: WalkingCoin) -> TokenTree:
        drawn = TokenTree.chain([0, coin.draw(Law(q[0]))], Laws(q, None, torch.tensor([0])))
        return merge([TokenTree.chain([0, 1]), drawn])[0]

    law = judged_law(lossless, p, draw)
    assert is_exact(law, p, 2)
    assert by_length(law)[1] == F(7, 10) + F(1, 20)


def held(tree: TokenTree, modes: Sequence[float]) -> TokenTree:
    """Give a drawn chain the confidence of its laws' modes."""
    path = torch.tensor([1.0, *modes]).cumprod(0)
    return TokenTree(tree.tokens, tree.parent, tree.laws, path.log())


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_chosen_trees_are_exact(nodes: int) -> None:
    """The budget cuts drawn chains whose laws' modes say how sure they are, and point masses.

    So which nodes are submitted depends on what was drawn above them, never on themselves.
    """

    def draw(coin: WalkingCoin) -> TokenTree:
        tree = drawn_tree(DRAFTER, (1, 1), coin, distinct=False)
        modes = [float(max(DRAFTER[token])) for token in tree.token_list[:-1]]
        drafted = {0: TokenTree.from_paths(0, [[0, 0], [1]]), 1: held(tree, modes)}
        chosen = choose(drafted, Survival(), Chain(nodes))[1]
        assert chosen.drafted <= nodes
        return chosen

    law = judged_law(lossless, TARGET, draw)
    assert is_exact(law, TARGET, 3)
    assert mean_length(law) > 1


def test_choosing_by_the_drawn_token_itself_is_not_exact() -> None:
    """The error that `choose` avoids: a drawn node is dropped because its own token scores low."""

    def draw(coin: WalkingCoin) -> TokenTree:
        tree = drawn_tree(DRAFTER, (1,), coin, distinct=False)
        return tree.keep([0]) if DRAFTER[0][tree.token_list[1]] < F(3, 10) else tree

    assert not is_exact(judged_law(lossless, TARGET, draw), TARGET, 2)

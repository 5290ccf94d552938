"""Classic errors of speculative sampling: the exact-law check detects each of them.

Every wrong variant is written here and runs through the check that the verifiers must pass. Where
its law is known by hand, it is compared with that too.
"""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from drafters.laws import Law, Laws
from drafters.tree import TokenTree
from inference.verify import Coin, Verdict, Verifier, block, lossless, traversal
from tests.exact import (
    WalkingCoin,
    drawn_tree,
    exact_law,
    extended,
    fractions,
    is_exact,
    judged_law,
    markov,
    round_law,
)

F = Fraction
P = fractions([6, 3, 1], [2, 5, 3], [3, 2, 5])
Q = fractions([1, 2, 7], [6, 3, 1], [1, 1, 8])
FOUR, REVERSED = fractions(*[[4, 3, 2, 1]] * 4), fractions(*[[1, 2, 3, 4]] * 4)


def first_token(law: dict, p: np.ndarray) -> list[float]:
    """Return the law of the first emitted token."""
    joint = extended(law, markov(p), 1)
    return [float(joint.get((token,), 0)) for token in range(len(p))]


def token_by_token(
    p: Laws, tree: TokenTree, coin: Coin, correct: Callable[[int, Law, Law], Law]
) -> Verdict:
    """Judge a chain; `correct(node, p, q)` is the law of the token after a refusal at `node`."""
    assert tree.laws is not None
    for node in range(1, len(tree)):
        law, drawn, token = p.law(node - 1), tree.laws.law(node - 1), tree.token_list[node]
        if not coin.accept(law.weight(token) / drawn.weight(token)):
            return Verdict(list(range(node)), coin.draw(correct(node, law, drawn)))
    return Verdict(list(range(len(tree))), coin.draw(p.law(tree.drafted)))


def right_correction(p: Laws, tree: TokenTree, coin: Coin) -> Verdict:
    return token_by_token(p, tree, coin, lambda node, law, drawn: law.minus(drawn))


def residual_from_p_alone(p: Laws, tree: TokenTree, coin: Coin) -> Verdict:
    return token_by_token(p, tree, coin, lambda node, law, drawn: law)


def residual_at_the_token_only(p: Laws, tree: TokenTree, coin: Coin) -> Verdict:
    """A01: only the refused token's mass is taken off."""

    def correct(node: int, law: Law, drawn: Law) -> Law:
        return law.without(tree.token_list[node])

    return token_by_token(p, tree, coin, correct)


def bonus_after_a_refusal_at_the_end(p: Laws, tree: TokenTree, coin: Coin) -> Verdict:
    """The last position's refusal is corrected from the row that holds the bonus's law."""

    def correct(node: int, law: Law, drawn: Law) -> Law:
        return p.law(node) if node == tree.drafted else law.minus(drawn)

    return token_by_token(p, tree, coin, correct)


def as_a_block(p: Laws, tree: TokenTree, coin: Coin, *, early: bool, soft: bool) -> Verdict:
    """Judge a chain as `block` does, upwards.

    Args:
        early: end at the first refusal.
        soft: take the correction from (p - q)+ in place of (w p - q)+.
    """
    assert tree.laws is not None
    ratio, ratios = F(1), [F(1)]
    for node in range(1, len(tree)):
        token = tree.token_list[node]
        gain = p.law(node - 1).weight(token) / tree.laws.law(node - 1).weight(token)
        ratio = min(F(1), ratio * gain)
        ratios.append(ratio)
    taken = 0
    for node in range(1, len(tree)):
        chance = ratios[node]
        if node < tree.drafted:
            mass = p.law(node).times(chance).minus(tree.laws.law(node)).weights.sum()
            chance = mass / (mass + 1 - chance) if mass + 1 - chance else 1
        if coin.accept(chance):
            taken = node
        elif early:
            break
    law = p.law(taken)
    if taken < tree.drafted:
        law = law.times(1 if soft else ratios[taken]).minus(tree.laws.law(taken))
    return Verdict(list(range(taken + 1)), coin.draw(law))


def right_block(p: Laws, tree: TokenTree, coin: Coin) -> Verdict:
    return as_a_block(p, tree, coin, early=False, soft=False)


def early_break_in_block(p: Laws, tree: TokenTree, coin: Coin) -> Verdict:
    return as_a_block(p, tree, coin, early=True, soft=False)


def token_residual_in_block(p: Laws, tree: TokenTree, coin: Coin) -> Verdict:
    return as_a_block(p, tree, coin, early=False, soft=True)


CHAINS: list[tuple[Verifier, bool]] = [
    (lossless, True),
    (block, True),
    (right_correction, True),
    (right_block, True),
    (residual_from_p_alone, False),
    (residual_at_the_token_only, False),
    (bonus_after_a_refusal_at_the_end, False),
    (early_break_in_block, False),
    (token_residual_in_block, False),
]


@pytest.mark.parametrize(("verify", "right"), CHAINS, ids=lambda x: getattr(x, "__name__", ""))
def test_chains(verify: Verifier, right: bool) -> None:
    law = round_law(verify, P, Q, (1, 1, 1))
    assert sum(law.values()) == 1
    assert is_exact(law, P, 4) == right


def relabelled(tree: TokenTree, laws: Laws | None, order: list[int] | None = None) -> TokenTree:
    """Return a tree that claims other laws for its nodes, siblings in another order."""
    tokens = tree.tokens if order is None else tree.tokens[torch.tensor(order)]
    return TokenTree(tokens, tree.parent, laws)


def distinct_pair(coin: WalkingCoin) -> TokenTree:
    return drawn_tree(REVERSED, (2,), coin, distinct=True)


def stale_q(coin: WalkingCoin) -> TokenTree:
    """The second sibling is judged by the law of the first."""
    tree = distinct_pair(coin)
    assert tree.laws is not None
    first = Laws(tree.laws.probs, None, torch.tensor([0, 0]))
    return relabelled(tree, first)


def sorted_by_q(coin: WalkingCoin) -> TokenTree:
    """The likelier sibling is tried first, as if it had been drawn first."""
    tree = distinct_pair(coin)
    tokens = sorted(tree.token_list[1:], key=lambda token: -REVERSED[0][token])
    first = Law(REVERSED[0])
    second = first.without(tokens[0]).normalised()
    assert second is not None
    laws = Laws(np.array([first.weights, second.weights]), None, torch.arange(2))
    return TokenTree(torch.tensor([0, *tokens]), tree.parent, laws)


@pytest.mark.parametrize("verify", [lossless, traversal])
@pytest.mark.parametrize(
    ("draw", "law"),
    [
        (distinct_pair, [0.4, 0.3, 0.2, 0.1]),
        (stale_q, [0.3566, 0.3434, 0.2, 0.1]),
        (sorted_by_q, [0.4377, 0.2253, 0.1579, 0.1790]),
    ],
)
def test_siblings(
    verify: Verifier, draw: Callable[[WalkingCoin], TokenTree], law: list[float]
) -> None:
    found = judged_law(verify, FOUR, draw)
    assert is_exact(found, FOUR, 2) == (draw is distinct_pair)
    if verify is lossless:
        assert first_token(found, FOUR) == pytest.approx(law, abs=1e-4)


@pytest.mark.parametrize("verify", [lossless, block, traversal])
def test_a_soft_q_for_an_argmax_draft(verify: Verifier) -> None:
    p, q = fractions(*[[5, 3, 2]] * 3), fractions([6, 3, 1])
    soft = TokenTree.chain([0, 0], Laws(q, None, torch.tensor([0])))
    hard = TokenTree.chain([0, 0])
    wrong, right = (judged_law(verify, p, lambda coin, t=tree: t) for tree in (soft, hard))
    assert not is_exact(wrong, p, 2)
    assert first_token(wrong, p) == pytest.approx([5 / 6, 0, 1 / 6])
    assert is_exact(right, p, 2)


@pytest.mark.parametrize(
    ("p", "q", "submit", "law"),
    [
        # a token is dropped for its own low q
        ([2, 3, 5], [6, 3, 1], lambda token: token == 0, [0.28, 0.12, 0.60]),
        # the length is chosen with the token in view: the first always stays, the second never
        ([7, 3], [5, 5], lambda token: token == 0, [0.85, 0.15]),
    ],
)
def test_dropping_a_token_by_its_own_q(
    p: list[int], q: list[int], submit: Callable[[int], bool], law: list[float]
) -> None:
    table, drafted = fractions(*[p] * len(p)), fractions(q)

    def draw(coin: WalkingCoin) -> TokenTree:
        token = coin.draw(Law(drafted[0]))
        kept = [0, token] if submit(token) else [0]
        return TokenTree.chain(kept, Laws(drafted, None, torch.arange(len(kept) - 1)))

    found = judged_law(lossless, table, draw)
    assert not is_exact(found, table, 2)
    assert first_token(found, table) == pytest.approx(law)


class OneUniform:
    """A coin whose drawing and judging read one number: cell k of n stands for [k/n, (k+1)/n)."""

    def __init__(self, cell: int, cells: int) -> None:
        self.share = F(2 * cell + 1, 2 * cells)

    def draw(self, law: Law) -> int:
        ends = np.cumsum(law.weights / law.weights.sum())
        return int(np.searchsorted(ends, self.share, side="right"))

    def accept(self, probability: Fraction) -> bool:
        return self.share < probability


@pytest.mark.parametrize("shared", [True, False])
def test_shared_noise(shared: bool) -> None:
    """p = (.5, .3, .2), q = (.2, .3, .5): drawing and judging by one number gives (.7, .3, 0)."""
    p, q, cells = fractions([5, 3, 2]), fractions([2, 3, 5]), 10
    even = Law(fractions([1] * cells)[0])

    def procedure(walk: WalkingCoin) -> int:
        noise = OneUniform(walk.draw(even), cells)
        tree = TokenTree.chain([0, noise.draw(Law(q[0]))], Laws(q, None, torch.tensor([0])))
        judge = noise if shared else OneUniform(walk.draw(even), cells)
        after = Laws(np.repeat(p, 2, 0), None, torch.arange(2))
        verdict = lossless(after, tree, judge)
        return tree.token_list[1] if len(verdict.path) == 2 else verdict.token

    law = exact_law(procedure)
    found = [law.get(token, 0) for token in range(3)]
    if shared:
        assert found == [F(7, 10), F(3, 10), 0]
    else:
        # a refused token is always token 2, its correction always token 0: no draw depends on u
        assert found == list(p[0])

"""Emitted laws, exactly: every outcome of drafting and judging is walked and summed."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.growth.ledger import Ledger
from drafters.growth.prices import Prices
from drafters.laws import Law, Laws
from drafters.tree import TokenTree
from inference.verify import Verifier, block, lossless, traversal, typical
from tests.exact import (
    WalkingCoin,
    drawn_tree,
    emitted,
    exact_law,
    extended,
    fractions,
    is_exact,
    judged_law,
    laws_of,
    markov,
    mean_length,
    outcomes,
    round_law,
)

F = Fraction


# the worked example: next-token laws of target and drafter after a, b, c
TARGET = fractions([6, 3, 1], [2, 5, 3], [3, 2, 5])
DRAFTER = fractions([5, 4, 1], [4, 3, 3], [1, 2, 7])

# zeros in both; b is never drafted after a, c never emitted after b
HOLES = fractions([0, 1, 1], [2, 1, 0], [1, 0, 0])
HOLES_DRAFTED = fractions([1, 0, 1], [0, 1, 1], [1, 1, 1])


def by_length(law: dict) -> list:
    """Return the probability of 0, 1, 2, ... accepted drafts: one less than what is emitted."""
    longest = max(len(tokens) for tokens in law)
    return [sum(v for e, v in law.items() if len(e) == n) for n in range(1, longest + 1)]


def every(row: list[int]) -> np.ndarray:
    """Return a table in which every token has this law after it."""
    return fractions(*[row] * len(row))


NARROW = [(1,), (1, 1), (2,), (3,), (2, 1), (1, 2)]
# Thousands of outcomes where siblings may be equal: the narrow ones show each of their parts.
WIDE = [(2, 2), (3, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("verify", [lossless, traversal])
@pytest.mark.parametrize(
    ("branching", "distinct"),
    [
        *((shape, distinct) for shape in NARROW for distinct in (False, True)),
        *((shape, True) for shape in WIDE),
        *(pytest.param(shape, False, marks=pytest.mark.slow) for shape in WIDE),
    ],
)
def test_drawn_trees_emit_the_target_law(
    branching: tuple[int, ...], verify: Verifier, distinct: bool
) -> None:
    law = round_law(verify, TARGET, DRAFTER, branching, distinct=distinct)
    assert sum(law.values()) == 1
    assert is_exact(law, TARGET, len(branching) + 1)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([1, 0, 0], [1, 1, 1]),  # p is a point mass
        ([0, 1, 1], [1, 1, 0]),  # zeros in both
        ([1, 1, 2], [1, 1, 2]),  # p = q
        ([5, 3, 2], [6, 3, 1]),
        ([1, 0, 0], [0, 1, 1]),  # no id in common
    ],
)
@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("verify", [lossless, traversal])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_degenerate_laws(
    p: list[int], q: list[int], width: int, verify: Verifier, distinct: bool
) -> None:
    law = round_law(verify, every(p), every(q), (width,), distinct=distinct)
    assert is_exact(law, every(p), 2)
    if p == q:
        assert by_length(law) == [0, 1]


@pytest.mark.parametrize("verify", [lossless, block, traversal])
@pytest.mark.parametrize("start", [0, 1, 2])
def test_chains_of_three_from_every_start(verify: Verifier, start: int) -> None:
    law = round_law(verify, TARGET, DRAFTER, (1, 1, 1), start=start)
    assert all(is_exact(law, TARGET, length, start) for length in (1, 2, 3, 4))


@pytest.mark.parametrize("verify", [lossless, block, traversal])
@pytest.mark.parametrize("start", [0, 1, 2])
def test_chains_over_holes(verify: Verifier, start: int) -> None:
    law = round_law(verify, HOLES, HOLES_DRAFTED, (1, 1, 1), start=start)
    assert is_exact(law, HOLES, 4, start)


@pytest.mark.parametrize("verify", [lossless, block, traversal])
def test_a_drafter_that_is_the_target_loses_nothing(verify: Verifier) -> None:
    law = round_law(verify, TARGET, TARGET, (1, 1, 1))
    assert by_length(law) == [0, 0, 0, 1]


def test_worked_example_of_a_chain() -> None:
    law = round_law(lossless, TARGET, DRAFTER, (1, 1, 1))
    assert by_length(law) == [F(1, 10), F(13, 100), F(61, 500), F(81, 125)]
    assert mean_length(law) == F(1659, 500)
    assert len(law) == 94
    joint = extended(law, markov(TARGET), 2)
    assert joint == {
        (0, 0): F(9, 25),
        (0, 1): F(9, 50),
        (0, 2): F(3, 50),
        (1, 0): F(3, 50),
        (1, 1): F(3, 20),
        (1, 2): F(9, 100),
        (2, 0): F(3, 100),
        (2, 1): F(1, 50),
        (2, 2): F(1, 20),
    }


@pytest.mark.parametrize("verify", [block, traversal])
def test_worked_example_of_a_block(verify: Verifier) -> None:
    """With one child a node, traversal is block verification: the same outcomes throughout."""
    law = round_law(verify, TARGET, DRAFTER, (1, 1, 1))
    assert by_length(law) == [F(1, 10), F(1, 10), F(51, 500), F(349, 500)]
    assert mean_length(law) == F(1699, 500)
    assert law == round_law(block, TARGET, DRAFTER, (1, 1, 1))


def test_the_toy_chain_of_two() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3): 10/9 accepted drafts one by one, 11/9 as a block."""
    p, q = every([1, 2]), every([2, 1])
    assert mean_length(round_law(lossless, p, q, (1, 1))) - 1 == F(10, 9)
    assert mean_length(round_law(block, p, q, (1, 1))) - 1 == F(11, 9)


def test_one_block_by_hand() -> None:
    """w = 5/8, 5/56; S_1 = 21/80, h_1 = 7/17; the residual after one accepted token is (1, 0)."""
    q = Laws(fractions([8, 2], [3, 7]), None, torch.arange(2))
    tree = TokenTree.chain([0, 0, 1], q)
    p = fractions([1, 1], [9, 1], [1, 1])
    law = exact_law(lambda coin: _parts(block(laws_of(p), tree, coin)))
    assert sum(v for (path, _), v in law.items() if len(path) == 3) == F(5, 56)
    assert law[(0, 1), 0] == F(3, 8)
    assert ((0, 1), 1) not in law
    assert law[(0,), 1] == F(15, 28)


@pytest.mark.parametrize("verify", [lossless, block, traversal])
def test_the_five_words(verify: Verifier) -> None:
    """Acceptance .75, residual (.4, .6, 0, 0, 0)."""
    p, q = every([40, 25, 20, 10, 5]), every([30, 10, 40, 15, 5])
    law = round_law(verify, p, q, (1,))
    assert is_exact(law, p, 2)
    refused = {e[0]: v for e, v in law.items() if len(e) == 1}
    assert refused == {0: F(1, 4) * F(2, 5), 1: F(1, 4) * F(3, 5)}


def test_vectors_of_siblings() -> None:
    """Acceptance at one node for k candidates drawn i.i.d. or distinct."""
    p, q = every([4, 3, 2, 1]), every([1, 2, 3, 4])
    for verify in (lossless, traversal):
        for width, value in enumerate([F(6, 10), F(72, 100), F(768, 1000)], start=1):
            assert by_length(round_law(verify, p, q, (width,)))[1] == value
        for width, value in enumerate([F(6, 10), F(107, 140)], start=1):
            assert by_length(round_law(verify, p, q, (width,), distinct=True))[1] == value
    three = by_length(round_law(lossless, p, q, (3,), distinct=True))[1]
    assert float(three) == pytest.approx(0.840298, abs=1e-6)


def test_point_masses_accept_their_mass() -> None:
    p = fractions([4, 3, 2, 1])
    for tokens, value in ([[3]], F(1, 10)), ([[3], [2]], F(3, 10)), ([[3], [2], [1]], F(6, 10)):
        tree = TokenTree.from_paths(0, tokens)
        table = laws_of(np.repeat(p, 4, 0)[: len(tree)])
        law = exact_law(lambda coin, t=table, x=tree: lossless(t, x, coin).path[-1])
        assert 1 - law[0] == value


@pytest.mark.parametrize("verify", [lossless, traversal])
@pytest.mark.parametrize("order", [[0, -1], [-1, 0]])
def test_a_point_mass_beside_a_drawn_sibling(verify: Verifier, order: list[int]) -> None:
    """Mixed trees are exact whichever comes first, also where both hold one token."""
    p, q = every([5, 3, 2]), fractions([1, 1, 2])

    def draw(coin: WalkingCoin) -> TokenTree:
        drawn = coin.draw(Law(q[0]))
        tokens = [0, drawn, 1] if order[0] == 0 else [0, 1, drawn]
        return TokenTree(
            torch.tensor(tokens), torch.tensor([-1, 0, 0]), Laws(q, None, torch.tensor(order))
        )

    assert is_exact(judged_law(verify, p, draw), p, 2)


@pytest.mark.parametrize("verify", [block, traversal])
def test_a_block_of_point_masses_gains_nothing(verify: Verifier) -> None:
    """Judged by the general rule, fixed tokens are accepted as often as by lookup."""
    bare = TokenTree.chain([0, 1, 1, 2])
    held = TokenTree(bare.tokens, bare.parent, Laws(DRAFTER, None, torch.full((3,), -1)))
    law = judged_law(verify, TARGET, lambda coin: held)
    assert is_exact(law, TARGET, 4)
    assert law == judged_law(lossless, TARGET, lambda coin: bare)
    assert law == judged_law(verify, TARGET, lambda coin: bare)


@pytest.mark.parametrize("verify", [lossless, block, traversal])
@pytest.mark.parametrize("ids", [np.array([1, 3]), np.array([[1, 3], [1, 3]])])
def test_reduced_vocabulary_and_sparse_candidates(verify: Verifier, ids: np.ndarray) -> None:
    """q lives on some ids only; tokens outside still come with their mass."""
    p = fractions([2, 3, 4, 1], [1, 1, 1, 1], [1, 1, 1, 1], [4, 1, 1, 2])

    def draw(coin: WalkingCoin) -> TokenTree:
        q = Laws(fractions([3, 1], [1, 2]), ids, torch.tensor([0, 1]))
        return TokenTree.chain([0, coin.draw(q.law(0)), coin.draw(q.law(1))], q)

    assert is_exact(judged_law(verify, p, draw), p, 3)


@pytest.mark.parametrize(
    ("verify", "branching"),
    [(lossless, (2, 1)), (lossless, (1, 1, 1)), (block, (1, 1, 1)), (traversal, (2, 1))],
)
def test_a_correction_never_repeats_a_refused_child(
    verify: Verifier, branching: tuple[int, ...]
) -> None:
    """So a last token that equals a child was accepted: what Commit counts relies on it."""
    for tree, _ in outcomes(lambda coin: drawn_tree(DRAFTER, branching, coin, distinct=False)):
        laws = laws_of(TARGET[tree.token_list])
        for verdict, _ in outcomes(partial(verify, laws, tree)):
            below = tree.children[verdict.path[-1]]
            assert verdict.token not in [tree.token_list[child] for child in below]


def test_a01_first_position_residual() -> None:
    """A01: p=(.5,.3,.2), q=(.6,.3,.1): alpha .9 and the residual is all on token 2."""
    law = round_law(lossless, every([5, 3, 2]), every([6, 3, 1]), (1,))
    assert {e: v for e, v in law.items() if len(e) == 1} == {(2,): F(1, 10)}


def test_a02_greedy_takes_the_argmax() -> None:
    """A02: at temperature 0 both laws are point masses: token 1, never token 0."""
    p = fractions(["30/100", "50/100", "20/100"])
    one_hot = Laws(np.array([[F(1)], [F(1)]], dtype=object), np.array([[1], [1]]), torch.arange(2))
    tree = TokenTree.chain([5, int(p[0].argmax())])
    assert exact_law(lambda coin: lossless(one_hot, tree, coin).path[-1]) == {1: 1}
    tree = TokenTree.chain([5, 0])
    law = exact_law(lambda coin: emitted(tree, *_parts(lossless(one_hot, tree, coin))))
    assert law == {(1,): 1}


def _parts(verdict) -> tuple[tuple[int, ...], int]:
    return tuple(verdict.path), verdict.token


ROWS = st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=6, max_size=6)


def _tables(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    table = [row if sum(row) else [1, 0, 0] for row in rows]
    return fractions(*table[:3]), fractions(*table[3:])


def adaptive_law(
    p: np.ndarray, q: np.ndarray, depth: int, submits: Callable[[np.ndarray, int, int], bool]
) -> dict:
    """Draw a chain as long as `submits(law, token, level)` says so, judge it."""

    def procedure(coin: WalkingCoin) -> tuple[int, ...]:
        tokens, rows = [0], []
        for level in range(1, depth + 1):
            law = q[tokens[-1]]
            token = coin.draw(Law(law))
            if not submits(law, token, level):
                break
            tokens.append(token)
            rows.append(law)
        drawn = Laws(np.array(rows, dtype=object), None, torch.arange(len(rows)))
        tree = TokenTree.chain(tokens, drawn if rows else None)
        verdict = lossless(laws_of(p[tokens]), tree, coin)
        return emitted(tree, verdict.path, verdict.token)

    return exact_law(procedure)


@pytest.mark.parametrize("cost", [0.2, 0.35, 0.45, 0.6])
def test_a_chain_may_stop_by_its_law_and_what_was_drawn_above(cost: float) -> None:
    """The marginal rule decides by the law's mode, before the draw: exact at any price."""
    ledger = Ledger(Prices(((1, 1.0), (2, 1.0 + cost))), depth=3)

    def submits(law: np.ndarray, _: int, level: int) -> bool:
        return ledger.pays(ledger.chance(level, float(max(law))), level, level - 1.0, 1)

    law = adaptive_law(TARGET, DRAFTER, 3, submits)
    assert is_exact(law, TARGET, 4)


def test_a_chain_may_not_stop_by_the_token_itself() -> None:
    """Dropping a drawn token because its own q is low emits another law."""
    p, q = fractions(*[[2, 3, 5]] * 3), fractions(*[[6, 3, 1]] * 3)
    law = adaptive_law(p, q, 1, lambda row, token, _: row[token] >= F(4, 10))
    joint = extended(law, markov(p), 1)
    assert joint == {(0,): F(28, 100), (1,): F(12, 100), (2,): F(60, 100)}


@given(ROWS, st.booleans())
def test_any_laws(rows: list[list[int]], distinct: bool) -> None:
    """Random laws, zeros included, two siblings; from the leaves up is never worse."""
    p, q = _tables(rows)
    down = round_law(lossless, p, q, (2,), distinct=distinct)
    up = round_law(traversal, p, q, (2,), distinct=distinct)
    assert is_exact(down, p, 2)
    assert is_exact(up, p, 2)
    assert mean_length(up) >= mean_length(down)


@given(ROWS)
def test_any_chain(rows: list[list[int]]) -> None:
    """Random laws, zeros included, two drafts; a block never accepts fewer."""
    p, q = _tables(rows)
    one_by_one, whole = (round_law(verify, p, q, (1, 1)) for verify in (lossless, block))
    assert is_exact(one_by_one, p, 3)
    assert is_exact(whole, p, 3)
    assert mean_length(whole) >= mean_length(one_by_one)


def test_a_block_with_siblings_is_traversed() -> None:
    branching = (2, 1)
    whole, walked = (round_law(v, TARGET, DRAFTER, branching) for v in (block, traversal))
    assert whole == walked


class Refusing:
    """A coin that refuses what is certain, as rounding may; it keeps what it is asked."""

    def __init__(self) -> None:
        self.chances: list[object] = []

    def accept(self, probability: object) -> bool:
        self.chances.append(probability)
        return False

    def draw(self, law: Law) -> int:
        self.drawn = law
        return 0


@pytest.mark.parametrize("verify", [lossless, block])
def test_where_rounding_leaves_no_residual_the_target_is_drawn_from(verify: Verifier) -> None:
    p, coin = fractions([1, 2], [3, 1], [1, 1]), Refusing()
    tree = TokenTree.chain([0, 1, 0], Laws(p[:2], None, torch.arange(2)))
    assert verify(laws_of(p), tree, coin).path == [0]
    assert list(coin.drawn.weights) == [F(1, 3), F(2, 3)]
    assert coin.chances == ([1] if verify is lossless else [1, 1])


def test_point_masses_cost_one_draw_together() -> None:
    """No coin is tossed for those behind the last drawn sibling; one is for each before it."""
    p = laws_of(fractions(*[[1, 2, 1]] * 4))
    parent, probs = torch.tensor([-1, 0, 0, 0]), fractions([1, 1, 2])
    for laws, tosses in (
        (None, 0),
        (Laws(probs, None, torch.tensor([-1, -1, -1])), 0),
        (Laws(probs, None, torch.tensor([0, -1, -1])), 1),
        (Laws(probs, None, torch.tensor([-1, 0, -1])), 2),
    ):
        coin = Refusing()
        lossless(p, TokenTree(torch.tensor([0, 1, 2, 0]), parent, laws), coin)
        assert len(coin.chances) == tosses


@pytest.mark.parametrize("verify", [lossless, block, traversal, typical])
def test_one_law_per_node_is_asked_for(verify: Verifier) -> None:
    with pytest.raises(ValueError, match=r"^1 laws for 2 nodes: give one law per node$"):
        verify(laws_of(fractions([1, 1])), TokenTree.chain([0, 1]), WalkingCoin([]))

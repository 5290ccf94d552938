"""Emitted laws, exactly: every outcome of drafting and judging is walked and summed."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.growth.ledger import Ledger
from drafters.growth.prices import Prices
from drafters.laws import Law, Laws
from drafters.tree import TokenTree
from inference.verify import lossless
from tests.exact import WalkingCoin, emitted, exact_law, extended, fractions, laws_of, target_joint

F = Fraction


def markov(table: np.ndarray) -> Callable[[tuple[int, ...]], np.ndarray]:
    """A law that depends on the last token only; the empty context is token 0."""
    return lambda context: table[context[-1] if context else 0]


# the worked example: next-token laws of target and drafter after a, b, c
TARGET = fractions([6, 3, 1], [2, 5, 3], [3, 2, 5])
DRAFTER = fractions([5, 4, 1], [4, 3, 3], [1, 2, 7])


def round_law(p: np.ndarray, q: np.ndarray, branching: tuple[int, ...], *, distinct: bool) -> dict:
    """Draw a tree of this branching from q below token 0, judge it, return the emitted law."""

    def procedure(coin: WalkingCoin) -> tuple[int, ...]:
        tokens, parent, rows = [0], [-1], []
        level = [0]
        for width in branching:
            above, level = level, []
            for node in above:
                law = Law(q[tokens[node]])
                for _ in range(width):
                    normal = law.normalised()
                    if normal is None:  # no mass left: this sibling cannot exist
                        break
                    token = coin.draw(normal)
                    level.append(len(tokens))
                    tokens.append(token)
                    parent.append(node)
                    rows.append(normal.weights)
                    law = normal.without(token) if distinct else law
        drawn = Laws(np.array(rows, dtype=object), None, torch.arange(len(rows)))
        tree = TokenTree(torch.tensor(tokens), torch.tensor(parent), drawn)
        verdict = lossless(laws_of(p[tokens]), tree, coin)
        return emitted(tree, verdict.path, verdict.token)

    return exact_law(procedure)


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("branching", [(1,), (1, 1), (1, 1, 1), (2,), (3,), (2, 1), (2, 2), (3, 1)])
def test_drawn_trees_emit_the_target_law(branching: tuple[int, ...], distinct: bool) -> None:
    law = round_law(TARGET, DRAFTER, branching, distinct=distinct)
    assert sum(law.values()) == 1
    length = len(branching) + 1
    assert extended(law, markov(TARGET), length) == target_joint(markov(TARGET), 3, length)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([1, 0, 0], [1, 1, 1]),  # p is a point mass
        ([0, 1, 1], [1, 1, 0]),  # zeros in both
        ([1, 1, 2], [1, 1, 2]),  # p = q
        ([5, 3, 2], [6, 3, 1]),
    ],
)
@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_degenerate_laws(p: list[int], q: list[int], width: int, distinct: bool) -> None:
    law = round_law(fractions(p, p, p), fractions(q, q, q), (width,), distinct=distinct)
    target = markov(fractions(p, p, p))
    assert extended(law, target, 2) == target_joint(target, 3, 2)


def test_worked_example_of_a_chain() -> None:
    law = round_law(TARGET, DRAFTER, (1, 1, 1), distinct=False)
    by_length = {n: sum(v for e, v in law.items() if len(e) == n) for n in range(1, 5)}
    # lengths 1..4 do not tell accepted drafts apart from corrections: they are accepted + 1
    assert by_length == {1: F(1, 10), 2: F(13, 100), 3: F(61, 500), 4: F(81, 125)}
    assert sum(n * v for n, v in by_length.items()) == F(1659, 500)
    joint = extended(law, markov(TARGET), 2)
    assert joint[0, 0] == F(9, 25)
    assert joint[2, 2] == F(1, 20)
    assert joint[1, 2] == F(9, 100)


def test_vectors_of_siblings() -> None:
    """Acceptance at one node for k candidates drawn i.i.d., distinct, and as point masses."""
    p, q = fractions([4, 3, 2, 1]), fractions([1, 2, 3, 4])
    expected = {
        False: [F(6, 10), F(72, 100), F(768, 1000)],
        True: [F(6, 10), None, None],
    }
    for distinct, values in expected.items():
        for width, value in enumerate(values, start=1):
            p4, q4 = np.repeat(p, 4, 0), np.repeat(q, 4, 0)
            law = round_law(p4, q4, (width,), distinct=distinct)
            taken = sum(v for e, v in law.items() if len(e) == 2)
            if value is not None:
                assert taken == value
            else:
                assert float(taken) == pytest.approx({2: 0.764286, 3: 0.840298}[width], abs=1e-6)


def test_point_masses_accept_their_mass() -> None:
    p = fractions([4, 3, 2, 1])
    tree = TokenTree.from_paths(0, [[3], [2], [1]])
    law = exact_law(lambda coin: lossless(laws_of(np.repeat(p, 4, 0)), tree, coin).path[-1])
    assert 1 - law[0] == F(6, 10)


def test_a_point_mass_beside_a_drawn_sibling() -> None:
    """The drawn sibling is tried first, the fixed one after it: mixed trees are exact too."""
    p, q = fractions([5, 3, 2]), fractions([1, 1, 2])
    for order in ([0, -1], [-1, 0]):

        def procedure(coin: WalkingCoin, order: list[int] = order) -> tuple[int, ...]:
            drawn = coin.draw(Law(q[0]))
            tokens = [0, drawn, 1] if order[0] == 0 else [0, 1, drawn]
            tree = TokenTree(
                torch.tensor(tokens), torch.tensor([-1, 0, 0]), Laws(q, None, torch.tensor(order))
            )
            verdict = lossless(laws_of(np.repeat(p, 3, 0)), tree, coin)
            return emitted(tree, verdict.path, verdict.token)

        law = exact_law(procedure)
        target = markov(np.repeat(p, 3, 0))
        assert extended(law, target, 2) == target_joint(target, 3, 2)


def test_reduced_vocabulary_and_sparse_candidates() -> None:
    """q lives on some ids only; tokens outside still come with their mass."""
    p = fractions([2, 3, 4, 1])
    for ids in (np.array([1, 3]), np.array([[1, 3]])):

        def procedure(coin: WalkingCoin, ids: np.ndarray = ids) -> tuple[int, ...]:
            q = Laws(fractions([3, 1]), ids, torch.tensor([0]))
            token = coin.draw(q.law(0))
            tree = TokenTree(torch.tensor([0, token]), torch.tensor([-1, 0]), q)
            verdict = lossless(laws_of(np.repeat(p, 2, 0)), tree, coin)
            return emitted(tree, verdict.path, verdict.token)

        target = markov(np.repeat(p, 4, 0))
        assert extended(exact_law(procedure), target, 2) == target_joint(target, 4, 2)


def test_a01_first_position_residual() -> None:
    """A01: p=(.5,.3,.2), q=(.6,.3,.1): alpha .9 and the residual is all on token 2."""
    law = round_law(fractions(*[[5, 3, 2]] * 3), fractions(*[[6, 3, 1]] * 3), (1,), distinct=False)
    refused = {e: v for e, v in law.items() if len(e) == 1}
    assert sum(refused.values()) == F(1, 10)
    assert set(refused) == {(2,)}


def test_a02_greedy_takes_the_argmax() -> None:
    """A02: at temperature 0 both laws are point masses: token 1, never token 0."""
    p = fractions(["30/100", "50/100", "20/100"])
    one_hot = Laws(np.array([[F(1)], [F(1)]], dtype=object), np.array([[1], [1]]), torch.arange(2))
    tree = TokenTree.chain([5, int(p[0].argmax())])
    assert exact_law(lambda coin: lossless(one_hot, tree, coin).path[-1]) == {1: 1}
    tree = TokenTree.chain([5, 0])
    law = exact_law(lambda coin: emitted(tree, *_parts(lossless(one_hot, tree, coin))))
    assert law == {(1,): 1}


def _parts(verdict) -> tuple[list[int], int]:
    return verdict.path, verdict.token


@given(
    st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=6, max_size=6),
    st.booleans(),
)
def test_any_laws(rows: list[list[int]], distinct: bool) -> None:
    """Random laws, zeros included, two siblings."""
    table = [row if sum(row) else [1, 0, 0] for row in rows]
    p, q = fractions(*table[:3]), fractions(*table[3:])
    law = round_law(p, q, (2,), distinct=distinct)
    assert extended(law, markov(p), 2) == target_joint(markov(p), 3, 2)


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
    assert extended(law, markov(TARGET), 4) == target_joint(markov(TARGET), 3, 4)


def test_a_chain_may_not_stop_by_the_token_itself() -> None:
    """Dropping a drawn token because its own q is low emits another law."""
    p, q = fractions(*[[2, 3, 5]] * 3), fractions(*[[6, 3, 1]] * 3)
    law = adaptive_law(p, q, 1, lambda row, token, _: row[token] >= F(4, 10))
    joint = extended(law, markov(p), 1)
    assert joint == {(0,): F(28, 100), (1,): F(12, 100), (2,): F(60, 100)}


def test_one_law_per_node_is_asked_for() -> None:
    with pytest.raises(ValueError, match="1 laws for 2 nodes"):
        lossless(laws_of(fractions([1, 1])), TokenTree.chain([0, 1]), WalkingCoin([]))

"""Laws stored densely, on shared ids or sparsely are one law to every operation."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from drafters.laws import Law, Laws
from tests.exact import fractions

SIZE = 5
P_IDS, Q_IDS = np.array([0, 2, 3]), np.array([4, 3, 0])
P, Q = fractions([1, 4, 2])[0], fractions([1, 2, 5])[0]


def dense(law: Law) -> list[Fraction]:
    return [Fraction(law.weight(token)) for token in range(SIZE)]


def stored(weights: np.ndarray, ids: np.ndarray, how: str) -> Law:
    """Store a law on its ids, or on all of them."""
    if how == "sparse":
        return Law(weights, ids)
    whole = np.array([Fraction(0)] * SIZE, dtype=object)
    whole[ids] = weights
    return Law(whole)


PAIRS = list(product(["dense", "sparse"], repeat=2))


@pytest.mark.parametrize(("how_p", "how_q"), PAIRS)
def test_minus(how_p: str, how_q: str) -> None:
    """(1/7, 0, 4/7, 2/7, 0) - (5/8, 0, 0, 2/8, 1/8), what is negative cut to 0."""
    p, q = stored(P, P_IDS, how_p), stored(Q, Q_IDS, how_q)
    left = p.minus(q)
    assert dense(left) == [0, 0, Fraction(4, 7), Fraction(2, 7) - Fraction(1, 4), 0]
    assert left.ids is p.ids
    assert dense(p) == [Fraction(1, 7), 0, Fraction(4, 7), Fraction(2, 7), 0]  # as it was


def test_minus_on_shared_ids() -> None:
    p, q = Law(P, P_IDS), Law(Q, P_IDS)
    assert dense(p.minus(q)) == [
        Fraction(1, 7) - Fraction(1, 8),
        0,
        Fraction(4, 7) - Fraction(1, 4),
        0,
        0,
    ]


@pytest.mark.parametrize("how", ["dense", "sparse"])
def test_without_takes_one_weight_off(how: str) -> None:
    p = stored(P, P_IDS, how)
    assert dense(p.without(2)) == [Fraction(1, 7), 0, 0, Fraction(2, 7), 0]
    assert dense(p.without(1)) == dense(p) == [Fraction(1, 7), 0, Fraction(4, 7), Fraction(2, 7), 0]
    assert p.without(2).ids is p.ids


@pytest.mark.parametrize("how", ["dense", "sparse"])
def test_times_and_normalised(how: str) -> None:
    p = stored(P, P_IDS, how)
    half = p.times(Fraction(1, 2))
    assert sum(dense(half)) == Fraction(1, 2)
    whole = half.normalised()
    assert whole is not None
    assert dense(whole) == dense(p)
    assert whole.ids is half.ids is p.ids
    assert half.times(Fraction(0)).normalised() is None


def test_laws_of_a_tree() -> None:
    rows, of = fractions([1, 1], [1, 3]), np.array([1, -1, 0])
    for ids, second in (
        (None, [0, 1]),
        (np.array([3, 4]), [3, 4]),
        (np.array([[1, 2], [3, 4]]), [3, 4]),
    ):
        laws = Laws(rows, ids, of)
        assert len(laws) == 2
        drawn = laws.drawn_from(1)
        assert drawn is not None
        assert [drawn.weight(token) for token in second] == [Fraction(1, 4), Fraction(3, 4)]
        assert laws.drawn_from(2) is None
        third = laws.drawn_from(3)
        assert third is not None
        assert list(third.weights) == [Fraction(1, 2)] * 2
        assert list(laws.law(1).weights) == list(drawn.weights)


def test_an_operation_gives_a_new_law() -> None:
    """What a law is made from stays as it was, also where nothing changes."""
    for how in ("dense", "sparse"):
        p = stored(P, P_IDS, how)
        for other in (p.without(0), p.minus(p), p.times(0)):
            assert dense(other) != dense(p)
        assert dense(p) == [Fraction(1, 7), 0, Fraction(4, 7), Fraction(2, 7), 0]


def test_laws_of_several_drafters_keep_their_own_ids() -> None:
    ids = np.array([3, 1])
    laws = Laws.gathered([Law(P), Law(Q[:2], ids)], np.array([1, 0]))
    assert len(laws) == 2
    assert laws.law(0).ids is None
    assert laws.law(1).ids is ids
    assert [laws.law(1).weight(token) for token in range(4)] == [0, Q[1], 0, Q[0]]
    assert laws.of_list == [1, 0]


def test_a_law_is_broken_where_its_first_weight_is_no_number() -> None:
    probs = torch.tensor([[0.5, 0.5], [torch.nan, torch.nan]])
    for laws in (probs, probs[:, :1]):
        assert Laws(laws, None, torch.arange(2)).broken.tolist() == [False, True]

"""Typical acceptance: what it accepts, and that it is lossy as its name says."""

from math import exp, log

import pytest
import torch

from drafters.laws import Laws
from drafters.tree import TokenTree
from inference.verify import Verdict, typical
from tests.exact import WalkingCoin, emitted, exact_law

SHARP = [0.9, 0.08, 0.02]


def laws(*rows: list[float]) -> Laws:
    return Laws(torch.tensor(rows, dtype=torch.float64), None, torch.arange(len(rows)))


def judge(p: Laws, tree: TokenTree, **limits: float) -> Verdict:
    return typical(p, tree, WalkingCoin([]), **limits)


def test_the_threshold_is_capped_where_the_law_is_sharp_and_falls_where_it_is_flat() -> None:
    entropy = -sum(x * log(x) for x in SHARP)
    assert 0.3 * exp(-entropy) > 0.09  # so .08 is refused by the cap alone
    assert judge(laws(SHARP, SHARP), TokenTree.chain([0, 1])).path == [0]
    flat = [0.3, 0.3, 0.315, 0.085]  # .085 is below the cap and above .3 exp(-H) = .082
    assert judge(laws(flat, flat), TokenTree.chain([0, 3])).path == [0, 1]
    assert judge(laws(flat, flat), TokenTree.chain([0, 3]), scale=0.32).path == [0]


def test_no_threshold_accepts_everything() -> None:
    p = laws(*[SHARP] * 4)
    assert judge(p, TokenTree.chain([0, 2, 2, 2]), most=0.0).path == [0, 1, 2, 3]


def test_a_point_mass_accepts_its_argmax_only() -> None:
    for one_hot in (
        laws(*[[0.0, 1.0, 0.0]] * 3),
        Laws(torch.ones(3, 1), torch.ones(3, 1, dtype=torch.int64), torch.arange(3)),
    ):
        for tokens, path in ([0, 1, 1], [0, 1, 2]), ([0, 1, 2], [0, 1]), ([0, 0, 1], [0]):
            tree = TokenTree.chain(tokens)
            law = exact_law(lambda coin, p=one_hot, t=tree: _key(typical(p, t, coin)))
            assert law == {(tuple(path), 1): 1.0}


def test_the_longest_path_wins_and_then_the_likeliest() -> None:
    row = [0.4, 0.35, 0.25]
    tree = TokenTree.from_paths(0, [[0], [1, 2], [2, 1], [1, 1]])
    assert judge(laws(*[row] * len(tree)), tree).path == tree.path(6)
    assert [tree.token_list[n] for n in tree.path(6)] == [0, 1, 1]


def test_the_cap_accepts_what_the_flat_threshold_would_refuse() -> None:
    law = [0.88, 0.1, 0.02]
    entropy = -sum(x * log(x) for x in law)
    assert 0.09 < 0.1 < 0.3 * exp(-entropy)
    assert judge(laws(law, law), TokenTree.chain([0, 1])).path == [0, 1]


def test_a_weight_at_the_threshold_is_not_above_it() -> None:
    law = [0.5, 0.25, 0.25]
    assert judge(laws(law, law), TokenTree.chain([0, 1]), most=0.25, scale=9.0).path == [0]
    assert judge(laws(law, law), TokenTree.chain([0, 1]), most=0.24, scale=9.0).path == [0, 1]


def test_a_token_that_cannot_come_leaves_the_entropy_alone() -> None:
    law = [0.3, 0.3, 0.315, 0.085, 0.0]  # .3 exp(-H) = .082 again
    assert judge(laws(law, law), TokenTree.chain([0, 3])).path == [0, 1]


def test_of_equals_the_elder_is_taken() -> None:
    law = [0.4, 0.4, 0.2]
    assert judge(laws(*[law] * 3), TokenTree.from_paths(0, [[1], [0]])).path == [0, 1]


def test_it_is_lossy() -> None:
    """p = (.5, .41, .09): token 2 is never emitted, and a drafted token is always taken."""
    p = laws(*[[0.5, 0.41, 0.09]] * 2)
    tree = TokenTree.chain([0, 1])
    law = exact_law(lambda coin: emitted(tree, *_parts(typical(p, tree, coin))))
    assert law == pytest.approx({(1, 0): 50 / 91, (1, 1): 41 / 91})


def _parts(verdict: Verdict) -> tuple[list[int], int]:
    return verdict.path, verdict.token


def _key(verdict: Verdict) -> tuple[tuple[int, ...], int]:
    return tuple(verdict.path), verdict.token

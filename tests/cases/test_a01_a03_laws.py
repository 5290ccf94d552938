"""A01: what a refusal leaves. A02: temperature 0. A03: fixed siblings. Exact laws, no draws."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from drafters.laws import Laws
from drafters.registry import build_drafter
from drafters.sampling import Warp
from drafters.tree import TokenTree
from inference import generate
from inference.verify import Verifier, block, lossless, traversal
from tests.exact import emitted, exact_law, fractions, is_exact, judged_law, laws_of, round_law
from tests.tiny import prompts_of, tiny_target

ALL = pytest.mark.parametrize("verify", [lossless, block, traversal])


def every(*row: int) -> np.ndarray:
    """The same law after every token."""
    return fractions(*[row] * len(row))


def accepted(law: dict) -> Fraction:
    """The chance that the one draft was accepted: two tokens are emitted."""
    return sum((v for tokens, v in law.items() if len(tokens) == 2), Fraction(0))


@ALL
@pytest.mark.parametrize(
    ("p", "q", "alpha"),
    [
        ((5, 3, 2), (2, 3, 5), Fraction(7, 10)),
        (
            (5, 3, 2),
            (5, 3, 2),
            Fraction(1),
        ),  # nothing is left to draw from, and nothing asks for it
        ((5, 3, 2), (0, 4, 6), Fraction(1, 2)),  # a token that is never drafted
        ((5, 5, 0), (2, 3, 5), Fraction(1, 2)),  # a draft that the target never emits
    ],
)
def test_a01_a_refusal_leaves_what_q_lacks(
    verify: Verifier, p: tuple[int, ...], q: tuple[int, ...], alpha: Fraction
) -> None:
    law = round_law(verify, every(*p), every(*q), (1,))
    assert is_exact(law, every(*p), 2)
    assert accepted(law) == alpha
    assert sum(law.values()) == 1


@ALL
def test_a02_at_temperature_0_both_laws_are_point_masses(verify: Verifier) -> None:
    """Token 0 is likelier for the drafter, token 1 for the target: 1 comes, drafted or not."""
    warp = Warp(0.0)
    p = warp.laws(torch.tensor([[0.3, 0.5, 0.2]] * 2).log())
    q = warp.laws(torch.tensor([[0.4, 0.35, 0.25]]).log())
    for draft in (0, 1):
        for held in (None, Laws(q.probs, q.ids, torch.tensor([0 if draft == 0 else -1]))):
            tree = TokenTree.chain([2, draft], held)
            law = exact_law(lambda coin, t=tree: first_token(verify(p, t, coin), t))
            assert law == {1: 1}


def first_token(verdict, tree: TokenTree) -> int:
    return emitted(tree, verdict.path, verdict.token)[0]


def test_a02_no_temperature_is_greedy() -> None:
    target = tiny_target(num_hidden_layers=2)
    prompts = prompts_of(5)
    ids = torch.tensor(prompts)
    wanted = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
    )
    ngram = build_drafter("ngram", {}, target.shape)
    for options in ({}, {"temperature": 0.0, "seed": 3}, {"temperature": 0.0, "top_k": 5}):
        (output,) = generate(target, ngram, prompts, max_new_tokens=12, **options)
        assert output.ids == wanted[0, 5:].tolist()


@pytest.mark.parametrize("verify", [lossless, traversal])
@pytest.mark.parametrize(
    ("p", "siblings", "firsts"),
    [
        (
            (40, 30, 20, 10),
            (0, 1),
            (Fraction(4, 10), Fraction(3, 10)),
        ),  # half of what the first one left
        ((51, 49, 0, 0), (0, 1), (Fraction(51, 100), Fraction(49, 100))),
        ((40, 30, 20, 10), (0, 0), (Fraction(4, 10), Fraction(0))),  # judged once
    ],
)
def test_a03_fixed_siblings_are_tried_one_after_the_other(
    verify: Verifier,
    p: tuple[int, ...],
    siblings: tuple[int, int],
    firsts: tuple[Fraction, Fraction],
) -> None:
    table = every(*p)
    tree = TokenTree(torch.tensor([0, *siblings]), torch.tensor([-1, 0, 0]))
    assert is_exact(judged_law(verify, table, lambda coin: tree), table, 2)
    laws = laws_of(table[tree.token_list])
    taken = exact_law(lambda coin: verify(laws, tree, coin).path[-1])
    assert taken.get(0, 0) == 1 - sum(firsts)
    by_token = [sum(taken.get(i + 1, 0) for i in (0, 1) if siblings[i] == t) for t in (0, 1)]
    assert by_token == list(firsts)

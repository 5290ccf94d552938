"""A29: a draft that makes states overflow changes nothing, and no NaN stays in a cache."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from drafters.base import Commit, Drafter, Features
from drafters.errors import UserError
from drafters.growth import Chain, Growth, Static
from drafters.registry import build_drafter
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from drafters.tree import TokenTree
from inference.engine import Decoder, Request
from inference.stop import Stop
from tests.exact import WalkingCoin, exact_law
from tests.property.test_engine_law import small
from tests.tiny import prompts_of, tiny_target
from tests.unit.test_every_drafter import NAMES
from tests.unit.test_every_drafter import make as make_drafter

BAD = 7
PROMPTS = prompts_of(9, 4, seed=1)
NEW = 13


def spoil(target: Target, token: int) -> None:
    """Make states overflow wherever this token is read."""
    target.model.get_input_embeddings().weight.data[token] = torch.inf


class Tempter:
    """Knows the right tokens of every row; puts the bad one beside them in the first row."""

    name = "tempter"
    features = Features()

    def __init__(self, truth: Sequence[Sequence[int]]) -> None:
        self.truth = truth
        self.done = [0] * len(truth)
        self.roots = [0] * len(truth)

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "Tempter":
        return self

    def observe(self, commits: Sequence[Commit | None]) -> None:
        for row, commit in enumerate(commits):
            if commit is not None:
                self.done[row] += len(commit.emitted)
                self.roots[row] = commit.root

    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        trees: list[TokenTree | None] = []
        for row, coins in enumerate(random):
            right = self.truth[row][self.done[row] : self.done[row] + 3]
            tokens, parent = [self.roots[row], *right], list(range(-1, len(right)))
            if row == 0:
                tokens, parent = [*tokens, BAD], [*parent, 0]
            tree = TokenTree(torch.tensor(tokens), torch.tensor(parent))
            trees.append(None if coins is None else tree)
        return trees


def decoder_of(
    target: Target, drafter: Drafter, growth: Growth, rows: int, warp: Warp | None = None
) -> Decoder:
    warp = warp or Warp()
    return Decoder(target, drafter, growth, rows=rows, capacity=30, warp=warp, stop=Stop())


def decode(decoder: Decoder) -> list[list[int]]:
    decoder.admit({i: Request(p, NEW, RowRandom(0, i)) for i, p in enumerate(PROMPTS)})
    while decoder.running:
        decoder.round()
    return [row.ids[len(p) :] for row, p in zip(decoder.rows, PROMPTS, strict=True) if row]


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_a29_a_branch_that_overflows(engine: str) -> None:
    target = tiny_target(engine=engine)
    plain = decode(decoder_of(target, build_drafter("none", {}, target.shape), Chain(1), 2))
    assert all(BAD not in text for text in (*plain, *PROMPTS))
    spoil(target, BAD)
    tempter = Tempter(plain)
    decoder = decoder_of(target, tempter, Chain(4), 2)
    decoder.admit({i: Request(p, NEW, RowRandom(0, i)) for i, p in enumerate(PROMPTS)})
    emitted: list[list[int]] = [[], []]
    while decoder.running:
        for row, commit in enumerate(decoder.round()):
            if commit is not None:
                emitted[row].append(len(commit.emitted))
        assert decoder.cache.store.isfinite().all()
    assert [row.ids[len(p) :] for row, p in zip(decoder.rows, PROMPTS, strict=True) if row] == plain
    # one token a round beside the bad one; the other row knows nothing of it
    assert emitted == [[1] * 12, [4] * 3]


@pytest.mark.parametrize("name", NAMES)
def test_a29_every_drafter_lives_with_it(name: str) -> None:
    target = tiny_target()
    plain = decode(decoder_of(target, build_drafter("none", {}, target.shape), Chain(1), 2))
    spoil(target, BAD)
    found = decode(decoder_of(target, make_drafter(name, target), Chain(3), 2))
    assert found == plain


def test_a29_plain_decoding_that_overflows_is_said() -> None:
    target = tiny_target()
    spoil(target, PROMPTS[1][2])
    decoder = decoder_of(target, build_drafter("none", {}, target.shape), Chain(1), 2)
    with pytest.raises(UserError, match=r"target tiny-llama gives logits that are not finite in"):
        decode(decoder)


@pytest.mark.parametrize("growth", [Chain(2, "sampled"), Static((2, 2), "sampled")], ids=str)
def test_a29_a_drafter_that_overflows_draws_from_a_law(growth: Growth) -> None:
    """Uniform in place of NaN: a law like any other, and the one the verifier is told."""
    target, small = tiny_target(), tiny_target(seed=9, num_hidden_layers=1)
    small.model.get_input_embeddings().weight.data[:] = torch.inf
    drafter = build_drafter("draft_model", {"model": small}, target.shape)
    decoder = decoder_of(target, drafter, growth, 1, Warp(1.0))
    decoder.admit({0: Request(PROMPTS[0], NEW, RowRandom(0))})
    while decoder.running:
        commit = decoder.round()[0]
        assert commit is not None
        assert commit.tree is not None
        if commit.tree.drafted:
            assert commit.tree.laws is not None
            first = commit.tree.laws.probs[0]
            assert torch.equal(first, torch.full_like(first, 1 / 128))


@pytest.mark.parametrize(
    ("spoilt_drafter", "spoilt_target"),
    [
        (False, True),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
    ],
)
def test_a29_the_law_is_untouched(spoilt_drafter: bool, spoilt_target: bool) -> None:
    """Whether a drawn token is submitted may not depend on it: exact, over every outcome.

    Where plain decoding goes on after the bad token it ends in the error, with its probability.
    """
    target, bad = small(3), 2
    prompt = [1, 0, 1]
    expected: dict[tuple[object, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[object, ...], float] = {}
        for tokens, probability in expected.items():
            if spoilt_target and bad in tokens:
                longer[tokens] = probability
                continue
            with torch.no_grad():
                logits = target.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
            for token, share in enumerate(logits.double().softmax(-1).tolist()):
                longer[*tokens, token] = probability * share
        expected = longer
    guesser = small(3, seed=2, layers=1)
    for model, spoilt in ((target, spoilt_target), (guesser, spoilt_drafter)):
        if spoilt:
            spoil(model, bad)
    drafter = build_drafter("draft_model", {"model": guesser}, target.shape)

    def procedure(coin: WalkingCoin) -> tuple[int, ...]:
        decoder = Decoder(
            target,
            drafter,
            Chain(1, "sampled"),
            rows=1,
            capacity=12,
            warp=Warp(1.0),
            stop=Stop(),
        )
        decoder.admit({0: Request(prompt, 3, SimpleNamespace(draft=coin, verify=coin))})
        try:
            while decoder.running:
                decoder.round()
        except UserError:
            assert decoder.rows[0].ids[-1] == bad
        return tuple(decoder.rows[0].ids[len(prompt) :])

    law = exact_law(procedure)
    assert law.keys() == expected.keys()
    assert max(abs(law[tokens] - value) for tokens, value in expected.items()) < 1e-5

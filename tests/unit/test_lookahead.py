"""Lookahead: the window is the target's own Jacobi iteration, and its n-grams are drafted."""

import pytest
import torch

from drafters.errors import UserError
from drafters.growth import Chain, Growth, Static
from drafters.methods.lookahead import LookaheadSession, Window
from drafters.registry import build_drafter
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from inference import generate
from inference.engine import Decoder, Request
from inference.stop import Stop
from tests.tiny import prompts_of, tiny_model, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=2, hidden_size=32, intermediate_size=64)


def next_token(target: Target, tokens: list[int]) -> int:
    with torch.no_grad():
        return int(target.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())


@pytest.mark.parametrize(("growth", "ngram"), [(Static((2, 2, 2, 2)), 3), (Static((3, 3, 3)), 4)])
def test_a_window_is_jacobi_iteration(target: Target, growth: Growth, ngram: int) -> None:
    """Every column's next guess is what a plain causal forward says after its own path."""
    [prompt] = prompts_of(7)
    drafter = build_drafter("lookahead", {"ngram": ngram}, target.shape)
    decoder = Decoder(target, drafter, growth, rows=1, capacity=40, warp=Warp(), stop=Stop())
    decoder.admit({0: Request(prompt, 24, RowRandom(0))})
    session, row = decoder.session, decoder.rows[0]
    assert isinstance(session, LookaheadSession)
    assert row is not None
    window = session.windows[0]
    assert len(window.columns) == growth.depth - ngram + 2
    for _ in range(5):
        before = [list(guesses) for guesses in window.columns]
        text = list(row.ids)
        [commit] = decoder.round()
        assert commit is not None
        assert commit.tree is not None
        assert commit.tree.drafted <= growth.nodes
        expected, pooled = [], []
        for column, guesses in enumerate(before):
            path = [g[0] for g in before[: column + 1]] + guesses[1:]
            token = next_token(target, text + path)
            expected.append([*guesses[1:], token])
            pooled.append((guesses[0], (*guesses[1:], token)))
        past = (len(commit.emitted) - 1) % len(expected)
        assert window.columns == expected[past:] + expected[:past]
        assert all(rest in window.pool[first] for first, rest in pooled)


def test_the_latest_ngrams_are_kept() -> None:
    window = Window(1, 3, 2, [5, 6, 7])
    assert window.columns == [[5, 6]]
    for token in (1, 2, 3):
        window.columns = [[5, 6]]
        window.refine({0: token}, 1)
    assert window.candidates(5) == [(6, 3), (6, 2)]
    assert window.candidates(4) == []
    window.columns = [[5, 6]]
    window.refine({0: 2}, 1)
    assert window.candidates(5) == [(6, 2), (6, 3)]


def test_columns_move_on_by_what_was_emitted() -> None:
    window = Window(3, 2, 5, [1, 2, 3])
    assert window.path(2) == [1, 2, 3]
    window.refine({0: 7, 1: 8, 2: 9}, 2)
    assert window.columns == [[8], [9], [7]]


def test_a_text_that_repeats_is_drafted() -> None:
    """A target that looks at the last token only goes in circles: soon whole n-grams are right."""
    model = tiny_model(num_hidden_layers=1)
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    target = Target(model, name="circles")
    drafter = build_drafter("lookahead", {}, target.shape)
    plain = build_drafter("none", {}, target.shape)
    prompts = prompts_of(6, 4)
    truth = [out.ids for out in generate(target, plain, prompts, max_new_tokens=60)]
    outputs = generate(target, drafter, prompts, growth=Static((4, 2, 1, 1)), max_new_tokens=60)
    assert [out.ids for out in outputs] == truth
    assert all(len(set(ids[-30:])) < 20 for ids in truth)
    assert min(out.tau for out in outputs) > 1.5


def test_too_few_nodes_for_a_window_draft_nothing(target: Target) -> None:
    drafter = build_drafter("lookahead", {"ngram": 4}, target.shape)
    [out] = generate(target, drafter, prompts_of(5), growth=Chain(2), max_new_tokens=6)
    assert out.tau == 1


def test_bad_options(target: Target) -> None:
    with pytest.raises(UserError, match="ngram is 1, candidates 5: give 2 or more"):
        build_drafter("lookahead", {"ngram": 1}, target.shape)

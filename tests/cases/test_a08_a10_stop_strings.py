"""A08: a stop string anywhere in a block, or across two, ends the text where Hugging Face ends it.

A10: ids, scores and counts end there too.
"""

import pytest
import torch

from drafters.growth import Chain
from drafters.registry import build_drafter
from drafters.target import Target
from inference import generate
from inference.generate import Generation
from inference.sampling import Sampling
from inference.stop import Stop
from tests.folders import VOCAB_SIZE, tiny_tokenizer
from tests.tiny import tiny_model

PROMPT = "in the end"
NEW = 40


@pytest.fixture(scope="module")
def target() -> Target:
    """A target that writes printable ASCII only: the other rows of its head are silent."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(vocab_size=VOCAB_SIZE)
    for token in range(VOCAB_SIZE):
        text = tokenizer.decode([token])
        if token < 3 or not (text.isascii() and text.isprintable()):
            model.lm_head.weight.data[token] = 0
    return Target(model, tokenizer, name="ascii")


@pytest.fixture(scope="module")
def plain(target: Target) -> list[int]:
    none = build_drafter("none", {}, target.shape)
    return generate(target, none, [PROMPT], max_new_tokens=NEW)[0].ids


def hf_with_string(target: Target, string: str) -> list[int]:
    ids = torch.tensor([target.tokenizer(PROMPT)["input_ids"]])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        stop_strings=[string],
        tokenizer=target.tokenizer,
        pad_token_id=2,
    )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("gamma", [12, 3, 1])
@pytest.mark.parametrize("span", [(3, 6), (1, 2), (4, 9)], ids=str)
def test_a08_and_a10(target: Target, plain: list[int], gamma: int, span: tuple[int, int]) -> None:
    string = target.tokenizer.decode(plain[slice(*span)])
    truth = hf_with_string(target, string)
    assert truth == plain[: len(truth)]
    assert len(truth) < NEW
    itself = build_drafter("draft_model", {"model": target}, target.shape)
    sampling = Sampling(NEW, stop_strings=(string,), scores=True)
    run = Generation(target, itself, [PROMPT], growth=Chain(gamma), sampling=sampling)
    streamed = [token for _, commit in run for token in commit.emitted]
    (output,) = run.outputs
    assert output.ids == truth == streamed
    assert output.finish_reason == "stop"
    assert len(output.scores) == len(truth)
    assert output.rounds * output.tau + 1 == pytest.approx(len(truth))


def test_a08_a_string_that_begins_in_the_prompt(target: Target, plain: list[int]) -> None:
    string = PROMPT[-2:] + target.tokenizer.decode(plain[:1])
    truth = hf_with_string(target, string)
    none = build_drafter("none", {}, target.shape)
    (output,) = generate(target, none, [PROMPT], max_new_tokens=NEW, stop_strings=[string])
    assert output.ids == truth == plain[:1]


def test_a08_a_string_that_ends_inside_a_token(target: Target) -> None:
    """The token is kept whole, as Hugging Face keeps it; a string in the prompt alone is none."""
    token = target.tokenizer.convert_tokens_to_ids("the")
    stop = Stop(strings=("th",), tokenizer=target.tokenizer)
    assert stop.cut([5], [token, 9], room=9) == (1, "stop")
    assert stop.cut([token], [9, 9], room=9) == (2, None)
    assert stop.cut([5], [9, token, token], room=9) == (2, "stop")


@pytest.mark.parametrize("string", ["é", "aé", "a💥", "é."])
def test_a08_a_string_whose_last_character_is_several_tokens(target: Target, string: str) -> None:
    """Half a character reads as another one, in the place that the whole one takes later."""
    ids = target.tokenizer("xxaé.a💥x")["input_ids"]
    ends = len(target.tokenizer("xxaé.a💥x".partition(string)[0] + string)["input_ids"])
    stop = Stop(strings=(string,), tokenizer=target.tokenizer)
    assert stop.cut([5], ids, room=99) == (ends, "stop")
    for place in range(1, len(ids)):  # the same, one round later
        found = stop.cut([5, *ids[:place]], ids[place:], room=99)
        assert found == ((ends - place, "stop") if place < ends else (len(ids) - place, None))


def test_a08_end_token_string_and_limit_in_one_block(target: Target) -> None:
    """Whatever comes first ends the row; on one token, an end goes before the limit."""
    letters = target.tokenizer("abcde")["input_ids"]
    stop = Stop(frozenset({letters[3]}), ("bc",), target.tokenizer)
    assert stop.cut([], letters, room=9) == (3, "stop")
    assert stop.cut([], letters, room=2) == (2, "length")
    assert stop.cut([], letters, room=3) == (3, "stop")
    assert stop.cut([], letters[3:], room=1) == (1, "stop")
    assert stop.cut([], letters[4:], room=2) == (1, None)

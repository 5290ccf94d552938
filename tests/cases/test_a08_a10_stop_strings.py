"""A08: a stop string anywhere in a block, or across two, ends the text where Hugging Face ends it.

A10: ids, scores and counts end there too.
"""

import pytest
import torch

from drafters.growth import Chain
from drafters.registry import build_drafter
from drafters.target import Target
from inference import generate
from inference.generate import Generation, Sampling
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


def test_a08_inside_a_token(target: Target, plain: list[int]) -> None:
    """The token that completes the string is kept whole, as Hugging Face keeps it."""
    token = target.tokenizer.convert_tokens_to_ids("the")
    model_says = target.tokenizer.decode([token])
    from inference.stop import Stop

    stop = Stop(strings=("th",), tokenizer=target.tokenizer)
    assert model_says == "the"
    assert stop.cut([5], [token, 9], room=9) == (1, "stop")

"""A07: an end token anywhere in a block ends the row there. A09: no end token is no trouble."""

import pytest
import torch

from drafters.base import Drafter
from drafters.growth import Chain, Static
from drafters.registry import build_drafter
from drafters.target import Target
from inference import generate
from tests.folders import letters
from tests.tiny import prompts_of, tiny_target
from tests.unit.test_every_drafter import NAMES
from tests.unit.test_every_drafter import make as make_drafter

PROMPT = prompts_of(12, seed=3)[0]
GAMMA = 6


@pytest.fixture(scope="module")
def target() -> Target:
    target = tiny_target()
    target.tokenizer = letters()
    return target


@pytest.fixture(scope="module")
def drafters(target: Target) -> list[Drafter]:
    return [make_drafter(name, target) for name in NAMES]


@pytest.fixture(scope="module")
def plain(target: Target) -> list[int]:
    (output,) = generate(target, make_drafter("none", target), [PROMPT], max_new_tokens=24)
    assert len(set(output.ids[: GAMMA + 2])) == GAMMA + 2
    return output.ids


def hf_with_end(target: Target, end: int) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=24,
        eos_token_id=end,
        pad_token_id=0,
    )
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.slow
# the prefill's token, third in a block, last draft, bonus
@pytest.mark.parametrize("place", [0, 3, GAMMA, GAMMA + 1])
def test_a07_ends_at_the_same_index(
    target: Target, plain: list[int], drafters: list[Drafter], place: int
) -> None:
    end = plain[place]
    truth = hf_with_end(target, end)
    assert truth == plain[: place + 1]
    for drafter in drafters:
        (output,) = generate(
            target, drafter, [PROMPT], growth=Chain(3), max_new_tokens=24, eos_ids=[end]
        )
        assert output.ids == truth, drafter.name
        assert output.finish_reason == "stop", drafter.name
    itself = build_drafter("draft_model", {"model": target}, target.shape)
    for growth in (Chain(GAMMA), Static((3, 1, 2, *[1] * (GAMMA - 3)))):
        (output,) = generate(
            target, itself, [PROMPT], growth=growth, max_new_tokens=24, eos_ids=[end]
        )
        assert output.ids == truth
        # what came after the end token is in no figure
        assert output.accepted == ([] if place == 0 else [min(place, GAMMA)])


def test_a07_a_drafted_end_token_that_is_refused_ends_nothing(target: Target) -> None:
    """An end token in the draft alone is not the target's."""
    (truth,) = generate(target, make_drafter("none", target), [PROMPT], max_new_tokens=24)
    absent = next(token for token in range(128) if token not in truth.ids)
    (output,) = generate(
        target, make_drafter("medusa", target), [PROMPT], max_new_tokens=24, eos_ids=[absent]
    )
    assert output.ids == truth.ids
    assert output.finish_reason == "length"


def test_a09_no_end_token_at_all(target: Target) -> None:
    assert target.eos_ids == frozenset()
    repeated = [5, 6, 7, 8, 5, 6, 7]
    (output,) = generate(
        target, make_drafter("ngram", target), [repeated], growth=Chain(3), max_new_tokens=15
    )
    assert len(output.ids) == 15
    assert output.finish_reason == "length"
    assert sum(output.drafted) > 0

"""A11: budgets of one token and about a block; prompts that fill the context."""

import pytest
import torch

from drafters.errors import UserError
from drafters.growth import Chain, Growth, Static
from drafters.registry import build_drafter
from drafters.target import Target
from inference import generate
from inference.generate import Output
from tests.tiny import prompts_of, tiny_target

GAMMA = 4
GROWTHS = [Chain(GAMMA), Static((2, 1, 1, 1))]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(max_position_embeddings=32)


def itself(target: Target, prompts: list[list[int]], growth: Growth, new: int) -> list[Output]:
    drafter = build_drafter("draft_model", {"model": target}, target.shape)
    return generate(target, drafter, prompts, growth=growth, max_new_tokens=new)


def hf_greedy(target: Target, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
@pytest.mark.parametrize("new", [1, 2, GAMMA, GAMMA + 1, GAMMA + 2])
def test_a11_exactly_the_budget(target: Target, growth: Growth, new: int) -> None:
    prompts = prompts_of(5, 9)
    for prompt, output in zip(prompts, itself(target, prompts, growth, new), strict=True):
        assert output.ids == hf_greedy(target, prompt, new)
        assert output.finish_reason == "length"
        assert output.rounds == {1: 0, GAMMA + 2: 1}.get(new, 1)
        assert output.tau == new - 1  # and 0 where no round ran: nothing is divided by zero


def test_a11_one_token_asks_no_drafter(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = build_drafter("draft_model", {"model": target}, target.shape)
    from drafters.session import CachedSession

    monkeypatch.setattr(CachedSession, "propose", lambda *_: pytest.fail("a draft was asked for"))
    (output,) = generate(target, drafter, prompts_of(5), max_new_tokens=1)
    assert len(output.ids) == 1


@pytest.mark.filterwarnings("ignore:a text outgrew the drafter's context")  # it is the target's
@pytest.mark.parametrize("growth", GROWTHS, ids=str)
@pytest.mark.parametrize("length", [31, 30, 27])
def test_a11_outputs_end_at_the_context(target: Target, growth: Growth, length: int) -> None:
    """Also where a whole draft would not fit any more."""
    (prompt,) = prompts_of(length)
    with pytest.warns(UserWarning, match="outputs end at the target's context of 32 tokens"):
        (output,) = itself(target, [prompt], growth, 64)
    assert output.ids == hf_greedy(target, prompt, 32 - length)
    assert output.finish_reason == "length"


def test_a11_a_prompt_that_fills_the_context(target: Target) -> None:
    with pytest.raises(UserError, match="a prompt has 32 tokens and the target's context holds 32"):
        itself(target, prompts_of(32), Chain(GAMMA), 4)


@pytest.mark.parametrize("new", [0, -1])
def test_a11_no_budget(target: Target, new: int) -> None:
    with pytest.raises(
        UserError, match=f"max_new_tokens is {new}: give a whole number of 1 or more"
    ):
        itself(target, prompts_of(4), Chain(GAMMA), new)

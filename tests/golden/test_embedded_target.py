"""On the embedded target: plain decoding equals Hugging Face's generate, drafts change nothing."""

from pathlib import Path

import pytest
import torch

from drafters import embedded
from drafters.growth import Chain, Static
from drafters.registry import build_drafter
from drafters.target import Target
from inference import generate
from inference.compare import compare
from inference.generate import Output
from inference.prompts import first_turn_ids, read_prompts
from tests.tiny import ScriptedDrafter

PROMPTS = Path(__file__).parents[2] / "configs" / "prompts" / "demo.jsonl"

pytestmark = [pytest.mark.slow, pytest.mark.net]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(embedded.fetch())


def hf_greedy(target: Target, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = target.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new)
    return out[0, len(prompt) :].tolist()


def check(
    target: Target, prompts: list[list[int]], truth: list[list[int]], outputs: list[Output]
) -> None:
    for prompt, expected, output in zip(prompts, truth, outputs, strict=True):
        difference = compare(target, prompt, output.ids, expected)
        assert difference is None or difference.near_tie


def test_demo_prompts_equal_hugging_face(target: Target) -> None:
    assert target.engine == "fast"
    prompts = first_turn_ids(target, read_prompts(PROMPTS, 8))
    truth = [hf_greedy(target, prompt, 32) for prompt in prompts]
    for name in ("none", "ngram"):
        drafter = build_drafter(name, {}, target.shape)
        outputs = generate(target, drafter, prompts, max_new_tokens=32, rows=4)
        check(target, prompts, truth, outputs)


def test_over_two_hundred_tokens(target: Target) -> None:
    """Plain, copied chains, and trees whose right path lies behind wrong siblings."""
    prompts = first_turn_ids(target, read_prompts(PROMPTS, 8))[-1:]
    truth = [hf_greedy(target, prompt, 200) for prompt in prompts]
    mixed = ScriptedDrafter(truth, [3, 1, 0, 2], target.shape.vocab_size, siblings=2)
    for drafter, growth in (
        (build_drafter("none", {}, target.shape), Chain(1)),
        (build_drafter("ngram", {}, target.shape), Chain(4)),
        (mixed, Static((3, 3, 3))),
    ):
        outputs = generate(target, drafter, prompts, growth=growth, max_new_tokens=200)
        check(target, prompts, truth, outputs)

"""Greedy output equals Hugging Face's generate, token for token, in float32."""

import warnings

import pytest
import torch

from drafters.growth import Chain
from drafters.registry import build_drafter
from drafters.target import Target
from inference import generate
from tests.tiny import ScriptedDrafter, prompts_of, tiny_target

PROMPTS = prompts_of(20, 5, 13, 1)
FAMILIES = {
    "llama": {},
    "llama-wide-heads": {"head_dim": 32},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-scaled": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
    "gpt2": {},
}


def make(name: str, engine: str) -> Target:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no lean forward")
        return tiny_target(name.split("-")[0], engine=engine, **FAMILIES[name])


def hf_greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=[(n, e) for n in FAMILIES for e in ("fast", "reference")])
def case(request: pytest.FixtureRequest) -> tuple[Target, list[list[int]]]:
    target = make(*request.param)
    return target, [hf_greedy(target, prompt, 32) for prompt in PROMPTS]


def test_plain_rows_of_unequal_length(case: tuple[Target, list[list[int]]]) -> None:
    target, truth = case
    outputs = generate(target, build_drafter("none", {}, target.shape), PROMPTS, max_new_tokens=32)
    assert [output.ids for output in outputs] == truth
    assert all(output.tau == 1 for output in outputs)


def test_scripted_drafts_change_nothing(case: tuple[Target, list[list[int]]]) -> None:
    """Right, wrong and mixed drafts: the output is the target's own; tau is what was scripted."""
    target, truth = case
    for wrong, tau in ((None, 31 / 8), ([0], 1.0), ([2, 0, 3, 1], None)):
        drafter = ScriptedDrafter(truth, wrong)
        outputs = generate(target, drafter, PROMPTS, growth=Chain(3), max_new_tokens=32)
        assert [output.ids for output in outputs] == truth
        if tau is not None:
            assert [output.tau for output in outputs] == [tau] * len(PROMPTS)


def test_fewer_rows_than_prompts(case: tuple[Target, list[list[int]]]) -> None:
    """Rows that end let others in; every output is what it is alone."""
    target, truth = case
    drafter = build_drafter("ngram", {}, target.shape)
    outputs = generate(target, drafter, PROMPTS, rows=2, max_new_tokens=32)
    assert [output.ids for output in outputs] == truth


def test_lean_forward_is_used_where_it_exists() -> None:
    assert make("llama", "fast").engine == "fast"
    assert make("llama", "reference").engine == "reference"
    with pytest.warns(UserWarning, match="gpt2 has no lean forward; using the reference engine"):
        assert tiny_target("gpt2").engine == "reference"

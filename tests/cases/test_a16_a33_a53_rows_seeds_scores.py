"""A16: two prompts at once. A33: seeds. A53: scores are the target's, whoever drafted."""

import random

import numpy as np
import pytest
import torch

from drafters.growth import Chain, Growth, Static
from drafters.registry import build_drafter
from drafters.target import Target
from inference import generate
from tests.folders import VOCAB_SIZE, tiny_tokenizer
from tests.tiny import prompts_of, tiny_model, tiny_target
from tests.unit.test_every_drafter import NAMES
from tests.unit.test_every_drafter import make as make_drafter


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(initializer_range=0.2)


def test_a16_each_of_two_texts_is_what_it_is_alone() -> None:
    target = Target(tiny_model(vocab_size=VOCAB_SIZE), tiny_tokenizer(), name="tiny")
    texts = ["Hello", "Goodbye, my dear old friend"]
    drafter = build_drafter("draft_model", {"model": target}, target.shape)
    together = generate(target, drafter, texts, max_new_tokens=20)
    alone = [generate(target, drafter, [text], max_new_tokens=20)[0] for text in texts]
    assert [output.ids for output in together] == [output.ids for output in alone]
    assert [output.text for output in together] == [output.text for output in alone]


@pytest.mark.parametrize("name", NAMES)
def test_a33_equal_seeds_draw_equal_texts(target: Target, name: str) -> None:
    drafter = make_drafter(name, target)

    def draw(seed: int) -> list[int]:
        (output,) = generate(
            target,
            drafter,
            [[1, 2, 3]],
            growth=Chain(3, "sampled"),
            max_new_tokens=10,
            temperature=2.0,
            seed=seed,
        )
        return output.ids

    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first, other, again = draw(42), draw(43), draw(42)
    assert first == again
    assert first != other
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("name", "growth"),
    [
        ("none", Chain(1)),
        ("draft_model", Chain(3, "sampled")),
        ("eagle", Static((2, 2))),
        ("itself", Chain(3)),
    ],
    ids=str,
)
def test_a53_scores_are_those_of_a_plain_pass(
    target: Target, name: str, growth: Growth, temperature: float
) -> None:
    """Logs of probabilities in the target's own law, before warping."""
    if name == "itself":
        drafter = build_drafter("draft_model", {"model": target}, target.shape)
    else:
        drafter = make_drafter(name, target)
    prompts = prompts_of(9, 4)
    outputs = generate(
        target,
        drafter,
        prompts,
        growth=growth,
        max_new_tokens=12,
        temperature=temperature,
        scores=True,
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([[*prompt, *output.ids]])
        with torch.no_grad():
            laws = target.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = laws[range(12), output.ids]
        assert torch.allclose(torch.tensor(output.scores), expected, atol=1e-4)


def test_a53_no_scores_unless_asked_for(target: Target) -> None:
    (output,) = generate(target, make_drafter("none", target), prompts_of(4), max_new_tokens=3)
    assert output.scores == []

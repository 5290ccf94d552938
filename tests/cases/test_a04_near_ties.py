"""A04: a difference to plain decoding is excused by equal logits alone, and its gap is told."""

import pytest

from drafters.growth import Chain, Growth, Static
from drafters.methods.none import NoDrafter
from drafters.target import Target
from inference import generate
from inference.compare import compare, tolerance
from tests.tiny import ScriptedDrafter, prompts_of, tiny_model, tiny_target

PROMPTS = prompts_of(6, 9, 4, 12)
GROWTHS: list[Growth] = [Chain(4), Static((4, 1, 1))]


def outputs(target: Target, growth: Growth | None = None) -> list[list[int]]:
    plain = [o.ids for o in generate(target, NoDrafter(), PROMPTS, max_new_tokens=24)]
    if growth is None:
        return plain
    wide = 3 if isinstance(growth, Static) else 0
    drafter = ScriptedDrafter(plain, [4, 1, 3], siblings=wide)
    drafted = generate(target, drafter, PROMPTS, growth=growth, max_new_tokens=24)
    return [o.ids for o in drafted]


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
def test_a04_float32_is_identical(growth: Growth) -> None:
    target = tiny_target(num_hidden_layers=2)
    assert outputs(target, growth) == outputs(target)


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
def test_a04_bfloat16_differs_where_logits_meet_and_nowhere_else(growth: Growth) -> None:
    target = Target(tiny_model(num_hidden_layers=2, initializer_range=0.05).bfloat16())
    for prompt, ours, theirs in zip(PROMPTS, outputs(target, growth), outputs(target), strict=True):
        found = compare(target, prompt, ours, theirs)
        assert found is None or (found.near_tie and found.gap is not None)


def test_a04_a_wrong_token_is_a_fault_with_its_gap() -> None:
    target = tiny_target(num_hidden_layers=2)
    (theirs, *_) = outputs(target)
    ours = [*theirs[:7], (theirs[7] + 1) % 128, *theirs[8:]]
    found = compare(target, PROMPTS[0], ours, theirs)
    assert found is not None
    assert (found.index, found.near_tie) == (7, False)
    assert found.gap is not None
    assert found.gap > tolerance(target.dtype, 1.0) == 1e-4

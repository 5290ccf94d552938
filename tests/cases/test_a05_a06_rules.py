"""A05: penalties hold while drafting. A06: a constraint holds on every branch of a tree."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from drafters.growth import Chain, Growth, Static
from drafters.registry import build_drafter
from drafters.rules import Rules
from drafters.target import Target
from inference import generate
from tests.tiny import prompts_of, tiny_target

PROMPT = [7, 7, 7, *prompts_of(4)[0], 7, 7]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=2)


def plain_hf(target: Target, **options: object) -> list[int]:
    ids = torch.tensor([PROMPT])
    made = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, **options
    )
    return made[0, len(PROMPT) :].tolist()


def drafted(target: Target, growth: Growth, **options: object) -> list[int]:
    itself = build_drafter("draft_model", {"model": target}, target.shape)
    (output,) = generate(target, itself, [PROMPT], growth=growth, max_new_tokens=16, **options)
    return output.ids


def test_a05_a_penalty_acts_on_drafts_too(target: Target) -> None:
    one, other = plain_hf(target, repetition_penalty=1.0), plain_hf(target, repetition_penalty=1.5)
    assert one != other
    for penalty, wanted in ((1.0, one), (1.5, other)):
        assert drafted(target, Chain(4), rules=Rules(repetition_penalty=penalty)) == wanted


def other_parity(ids: Sequence[int]) -> list[int]:
    return [token for token in range(128) if (token + ids[-1]) % 2]


@pytest.mark.slow
def test_a06_every_branch_keeps_the_constraint(target: Target) -> None:
    rules, tree = Rules(allowed=other_parity), Static((3, 3, 3))
    wanted = plain_hf(target, prefix_allowed_tokens_fn=lambda _, ids: other_parity(ids.tolist()))
    assert drafted(target, tree, rules=rules) == wanted
    for seed in range(8):
        ids = drafted(target, tree, rules=rules, temperature=1.5, seed=seed)
        assert all((a + b) % 2 for a, b in pairwise([PROMPT[-1], *ids]))

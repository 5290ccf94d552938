"""A51: more drafts than heads. A54: every depth asks its own module."""

import pytest
import torch

from drafters.errors import UserError
from drafters.growth import Chain
from drafters.methods.mtp import MtpDrafter
from drafters.registry import build_drafter
from drafters.target import Target
from inference.spec import Spec
from tests.forced import by_slot
from tests.neural import away, batch_of
from tests.tiny import prompts_of, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=2)


def test_a51_a_chain_beyond_the_heads_names_the_range(target: Target) -> None:
    drafter = build_drafter("medusa", {"heads": 3}, target.shape)
    with pytest.raises(UserError, match=r"4 levels .* 3 heads: .* from 1 to 3"):
        drafter.start(target, Chain(4), 1, 20)
    drafter.start(target, Chain(3), 1, 20)


@pytest.mark.parametrize("given", ["0", "-1", "three", "3.5", ""])
def test_a51_what_is_no_number_of_drafts_is_named(given: str) -> None:
    with pytest.raises(UserError, match="gamma"):
        Spec.parse(f"medusa:growth=chain,gamma={given}")


def test_a54_the_second_module_makes_the_second_draft(target: Target) -> None:
    drafter = away(MtpDrafter, target, 0.05, modules=2, unroll=3)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(10)))
    before = by_slot(drafter.predict(batch, target))
    with torch.no_grad():
        second = drafter.continuations()[1]
        second.layer.out.weight.zero_()
        second.layer.down.weight.zero_()
    after = by_slot(drafter.predict(batch, target))
    for (step, slot), logits in before.items():
        same = torch.allclose(logits, after[step, slot], atol=1e-5)
        assert same == (step == 0), (step, slot)

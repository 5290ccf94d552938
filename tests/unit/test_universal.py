"""Drafting across tokenizers: text is what both have in common, and the target decides."""

from pathlib import Path

import pytest
import torch

from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.growth import Chain, Dynamic
from drafters.methods.draft_model import DraftModel
from drafters.methods.none import NoDrafter
from drafters.methods.universal import UniversalDrafter
from drafters.registry import build_drafter
from drafters.target import Target
from inference import generate
from tests.folders import letters, save_tiny_target, tiny_tokenizer
from tests.tiny import prompts_of, tiny_model, tiny_target


def shifted(target: Target, by: int) -> Target:
    """Return the same model with every id moved: its tokenizer gives the same characters."""
    model = tiny_model()
    model.load_state_dict(target.model.state_dict())
    with torch.no_grad():
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight.copy_(table.weight.roll(by, 0))
    return Target(model, letters(roll=by), name="shifted")


def test_the_target_in_other_ids_is_always_right() -> None:
    target = tiny_target()
    target.tokenizer = letters()
    drafter = UniversalDrafter(shifted(target, 7))
    prompts = prompts_of(9, 4, 1)
    plain = generate(target, NoDrafter(), prompts, max_new_tokens=17)
    drafted = generate(target, drafter, prompts, growth=Chain(3), max_new_tokens=17)
    assert [o.ids for o in drafted] == [o.ids for o in plain]
    assert [o.tau for o in drafted] == [4.0] * 3


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_words_and_broken_characters_cost_drafts_never_the_text(temperature: float) -> None:
    """Byte-level tokens of a random model against a vocabulary without merges."""
    size = len(tiny_tokenizer())
    shape = {"num_hidden_layers": 2}
    target = Target(tiny_model(vocab_size=size, **shape), tiny_tokenizer(), name="bytes")
    other = tiny_tokenizer()
    other.add_tokens(["the ", "ing"])
    small = Target(tiny_model(vocab_size=size + 2, seed=4, **shape), other, name="small")
    prompts = [target.tokenizer(text)["input_ids"] for text in ("in the land", "thé ∑ and", "a")]
    settings = {"max_new_tokens": 16, "temperature": temperature, "seed": 3}
    drafter = UniversalDrafter(small)
    chain, tree = (
        generate(target, drafter, prompts, growth=growth, **settings)
        for growth in (Chain(3), Dynamic(6, 3, 3))
    )
    for drafted in (chain, tree):
        assert all(len(o.ids) == 16 or o.finish_reason == "eos" for o in drafted)
    if temperature > 0:
        return
    plain = generate(target, NoDrafter(), prompts, **settings)
    assert [o.ids for o in chain] == [o.ids for o in tree] == [o.ids for o in plain]
    for prompt, beside in zip(prompts, chain, strict=True):
        alone = generate(target, drafter, [prompt], growth=Chain(3), **settings)[0]
        assert alone.ids == beside.ids
        assert alone.rounds == beside.rounds


def test_tokenizers_are_asked_for_and_a_plain_draft_model_still_refuses(tmp_path: Path) -> None:
    target = tiny_target()
    with pytest.raises(UserError, match=r"draft model .* has no tokenizer"):
        UniversalDrafter(tiny_target())
    with pytest.raises(UserError, match=r"target .* has no tokenizer"):
        UniversalDrafter(shifted(target, 1)).start(target, Chain(2), 1, 16)
    target.tokenizer = letters()
    with pytest.raises(UserError, match=r"id 0 is .* universal:model="):
        DraftModel(shifted(target, 7)).check(target)
    folder = save_tiny_target(tmp_path / "small")
    drafter = build_drafter("universal", {"model": str(folder)}, target.shape)
    assert drafter.options() == {"model": str(folder)}
    with pytest.raises(UserError, match="one option, model"):
        load_drafter("universal", target)

"""A standalone drafter as a causal LM: transformers computes what it computes, and it drafts."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafters.base import Batch, NeuralDrafter
from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.formats.convert import export_drafter
from drafters.methods.draft_model import DraftModel
from drafters.target import Target
from inference import generate
from tests.folders import save_tiny_target
from tests.foreign import config_of, saved, shapes

KINDS = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "qwen2": {"attention_bias": True},
}
WHOLE = {"num_layers": 2, "draft_vocab_size": 0}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    place = tmp_path_factory.mktemp("target")
    return Target.load(save_tiny_target(place, num_hidden_layers=3, hidden_size=32))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_what_the_drafter_does(
    kind: str, target: Target, tmp_path: Path
) -> None:
    folder = saved(target, tmp_path / "d", "standalone", **WHOLE, **KINDS[kind])
    assert export_drafter(folder, "transformers", tmp_path / "out", target) == ()
    config = config_of(tmp_path / "out")
    assert config["model_type"] == kind
    assert config["tie_word_embeddings"] is False
    assert config["eos_token_id"] == 2
    model, about = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(about[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(target.tokenizer)
    ids = torch.randint(265, (2, 9))
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, NeuralDrafter)
    document, position = torch.zeros_like(ids), torch.arange(9).expand(2, 9)
    _, last = target.forward_batch(ids, document, position, drafter.features)
    batch = Batch(ids, torch.ones_like(ids).bool(), document, position, None, last)
    (prediction,) = drafter.predict(batch, target)
    with torch.no_grad():
        wanted = model(ids).logits.flatten(0, 1)[prediction.positions]
        found = prediction.logits(slice(0, len(prediction.positions)))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_it_drafts_as_it_is(target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "standalone", **WHOLE)
    export_drafter(folder, "vllm", tmp_path / "out", target)
    model = load_drafter(tmp_path / "out", target)
    assert isinstance(model, DraftModel)
    prompts = [[5, 6, 7, 8], [9, 3]]
    outputs = [
        generate(target, drafter, prompts, max_new_tokens=8)
        for drafter in (load_drafter(folder, target), model)
    ]
    for plain, exported in zip(*outputs, strict=True):
        assert (plain.ids, plain.accepted) == (exported.ids, exported.accepted)


@pytest.mark.slow
def test_transformers_drafts_with_it(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `assistant_model`: its greedy text is the target's own."""
    folder = saved(target, tmp_path / "d", "standalone", **WHOLE)
    export_drafter(folder, "transformers", tmp_path / "out", target)
    model, assistant = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        for place in (target.folder, tmp_path / "out")
    )
    asked = 0
    forward = type(assistant).forward

    def counted(self: object, *given: object, **named: object) -> object:
        nonlocal asked
        asked += self is assistant
        return forward(self, *given, **named)

    monkeypatch.setattr(type(assistant), "forward", counted)
    ids = torch.tensor([[5, 6, 7, 8, 9, 3, 4, 20]])
    greedy = {"do_sample": False, "max_new_tokens": 24, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(ids, **greedy)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **greedy), plain)
    assert asked > 0


def test_a_reduced_head_is_a_loss(target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "standalone", num_layers=1, draft_vocab_size=16)
    with pytest.raises(UserError, match="loses draft_vocab_size = 16 "):
        export_drafter(folder, "sglang", tmp_path / "out", target)
    export_drafter(folder, "sglang", tmp_path / "out", target, allow_loss=True)
    assert shapes(tmp_path / "out")["lm_head.weight"] == [265, 32]


def test_no_model_has_both_kinds_of_layers(target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "standalone", **WHOLE, qk_norm=True, attention_bias=True)
    with pytest.raises(UserError, match="no place for qk_norm together with attention_bias"):
        export_drafter(folder, "transformers", tmp_path / "out", target)

"""Targets of other makes: files (A38), dtypes (A40), heads (A41), rope (A42), depth (A43), norm
(A44), and none of them has a mask token to lend (A46).
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafters.base import NeuralDrafter
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.growth import Chain
from drafters.layers import Rotary
from drafters.losses import LossSettings, drafter_loss
from drafters.methods.none import NoDrafter
from drafters.registry import build_drafter
from drafters.shape import usual_taps
from drafters.target import Target
from drafters.teacher import Teacher
from inference import generate
from inference.compare import compare
from tests.folders import save_tiny_target
from tests.neural import batch_of
from tests.tiny import prompts_of, tiny_model, tiny_target

PROMPTS = prompts_of(6, 3)


def neural(name: str, target: Target, **options: object) -> NeuralDrafter:
    torch.manual_seed(0)
    drafter = build_drafter(name, options, target.shape)
    assert isinstance(drafter, NeuralDrafter)
    drafter.init_from(target)
    return drafter.eval()


def test_a38_one_file_or_many_with_an_index(tmp_path: Path) -> None:
    whole = save_tiny_target(tmp_path / "whole", num_hidden_layers=2)
    assert not (whole / "model.safetensors.index.json").exists()
    parts = save_tiny_target(tmp_path / "parts", num_hidden_layers=2)
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(parts, max_shard_size="50KB")
    (parts / "model.safetensors").unlink(missing_ok=True)
    assert (parts / "model.safetensors.index.json").exists()
    one, many = Target.load(whole), Target.load(parts)
    drafter = neural("eagle", one, taps=[0, 1])
    loaded = load_drafter(save_drafter(drafter, tmp_path / "d", one), many)  # one fingerprint
    first, second = (
        generate(target, loaded, PROMPTS, growth=Chain(2), max_new_tokens=6)
        for target in (one, many)
    )
    assert [o.ids for o in first] == [o.ids for o in second]


def test_a38_pickled_weights_are_refused_with_a_reason(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "t", num_hidden_layers=1)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        Target.load(folder)


@pytest.mark.parametrize("name", ["eagle", "medusa", "dflash", "mtp", "standalone"])
@pytest.mark.parametrize(
    ("of_target", "of_drafter"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=["bf16-target", "bf16-drafter"],
)
def test_a40_drafter_and_target_of_two_dtypes(
    name: str, of_target: torch.dtype, of_drafter: torch.dtype
) -> None:
    target = Target(tiny_model(num_hidden_layers=3).to(of_target))
    options = {"taps": [0, 1]} if name in ("eagle", "dflash") else {}
    options |= {"num_layers": 2} if name == "standalone" else {}
    drafter = neural(name, target, **options).to(of_drafter)
    plain = generate(target, NoDrafter(), PROMPTS, max_new_tokens=12)
    drafted = generate(target, drafter, PROMPTS, growth=Chain(3), max_new_tokens=12)
    for prompt, one, other in zip(PROMPTS, plain, drafted, strict=True):
        found = compare(target, prompt, other.ids, one.ids)
        assert found is None or found.near_tie


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("name", ["eagle", "dflash", "mtp", "standalone"])
def test_a41_heads_that_do_not_fill_the_width(family: str, name: str, tmp_path: Path) -> None:
    target = tiny_target(family, head_dim=32, num_hidden_layers=3, initializer_range=0.2)
    options = {"taps": [0, 1]} if name in ("eagle", "dflash") else {}
    options |= {"num_layers": 2} if name == "standalone" else {}
    qk_norm = {"qk_norm": True} if family == "qwen3" else {}
    drafter = neural(name, target, **options, **qk_norm).train()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(12)))
    for _ in range(2):
        teacher = Teacher(target, drafter.ids)
        sums = drafter_loss(drafter.predict(batch, target), batch, teacher, LossSettings())
        assert sums.loss.sum().isfinite()
        sums.loss.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    loaded = load_drafter(save_drafter(drafter.eval(), tmp_path / "d", target), target)
    assert isinstance(loaded, NeuralDrafter)
    assert loaded.shape.head_dim == 32  # type: ignore[attr-defined]
    plain = generate(target, NoDrafter(), PROMPTS, max_new_tokens=8)
    drafted = generate(target, loaded, PROMPTS, growth=Chain(3), max_new_tokens=8)
    assert [o.ids for o in drafted] == [o.ids for o in plain]


ROPES = {
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ROPES)
def test_a42_scaled_rotation_reaches_the_loaded_drafter(
    kind: str, layout: str, tmp_path: Path
) -> None:
    """From a target's folder in the new and in the old layout."""
    folder = save_tiny_target(tmp_path / "t", num_hidden_layers=2, rope_parameters=ROPES[kind])
    if layout == "rope_scaling":
        file = folder / "config.json"
        config = json.loads(file.read_text())
        scaling = config.pop("rope_parameters")
        config["rope_theta"] = scaling.pop("rope_theta")
        config["rope_scaling"] = scaling
        file.write_text(json.dumps(config))
    target = Target.load(folder)
    drafter = neural("eagle", target, taps=[0, 1])
    saved = save_drafter(drafter, tmp_path / "d", target)
    rope = json.loads((saved / "config.json").read_text())["shape"]["rope"]
    assert rope["rope_type"] == kind
    loaded = load_drafter(saved, target)
    cos, _ = target.model.base_model.rotary_emb(torch.zeros(1), torch.tensor([[200]]))
    ours, _ = Rotary(loaded.shape)(torch.tensor([200]))  # type: ignore[attr-defined]
    torch.testing.assert_close(ours[:, 0], cos[0])


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6])
def test_a43_a_shallow_target_asks_for_its_layers(layers: int) -> None:
    shape = tiny_target(num_hidden_layers=layers).shape
    message = rf"of 7 layers or more, this one has {layers}: .* 0 to {layers - 1}"
    for name in ("eagle", "peagle"):
        with pytest.raises(UserError, match=message):
            build_drafter(name, {}, shape)
    named = build_drafter("eagle", {"taps": [0]}, shape)
    assert named.features.layers == (0,)
    for taps in ([0, 0], [-1, 0], [0, layers], []):
        with pytest.raises(UserError, match=rf"distinct layers, ascending, from 0 to {layers - 1}"):
            build_drafter("eagle", {"taps": taps}, shape)


@pytest.mark.parametrize(("layers", "taps"), [(7, (1, 2, 3)), (8, (1, 3, 4)), (30, (1, 14, 26))])
def test_a43_default_layers_are_distinct_and_stored(layers: int, taps: tuple[int, ...]) -> None:
    assert usual_taps(layers) == taps
    if layers == 7:
        drafter = neural("eagle", tiny_target(num_hidden_layers=7))
        assert drafter.options()["taps"] == taps


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_a44_the_teacher_reads_the_normed_state_on_every_path(engine: str) -> None:
    """Batches, prefills and rounds of trees: head(state) is what the model's forward gives."""
    model = tiny_model(num_hidden_layers=2, initializer_range=0.1)
    model.model.norm.weight.data.fill_(3.0)
    target = Target(model, engine=engine)
    ids = torch.tensor(prompts_of(8))
    with torch.no_grad():
        wanted = model(ids).logits.log_softmax(-1)
    drafter = neural("medusa", target)
    batch = batch_of(target, drafter, ids)
    found = target.head(batch.last).log_softmax(-1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    kept = batch.last.clone()  # as a store keeps it in float32
    torch.testing.assert_close(target.head(kept).log_softmax(-1), wanted, atol=1e-5, rtol=1e-5)
    prefill = target.prefill([ids[0]], target.new_cache(1, 8), drafter.features)[0]
    assert prefill is not None
    torch.testing.assert_close(prefill.logits[-1:].log_softmax(-1), wanted[0, -1:])


def test_a46_no_vocabulary_lends_its_mask(tmp_path: Path) -> None:
    """Masked slots read a vector of the drafter's own: it is trained and stored with it."""
    target = tiny_target(num_hidden_layers=2)
    rows = target.model.get_input_embeddings().weight.shape[0]
    drafter = neural("dflash", target, taps=[0, 1])
    torch.nn.init.normal_(drafter.mask)  # type: ignore[attr-defined]
    loaded = load_drafter(save_drafter(drafter, tmp_path / "d", target), target)
    assert torch.equal(loaded.mask, drafter.mask)  # type: ignore[attr-defined]
    assert target.model.get_input_embeddings().weight.shape[0] == rows
    for key in ("mask_token_id", "mask_id"):
        with pytest.raises(UserError, match=f"unknown key '{key}'"):
            build_drafter("dflash", {"taps": [0, 1], key: 16}, target.shape)

"""A target with a layer on the disk is the same target; what cannot be spread is refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.base import Features
from drafters.errors import UserError
from drafters.fingerprint import Fingerprint
from drafters.loading import load_config
from drafters.reference import decoder_layers
from drafters.registry import build_drafter
from drafters.spread import layers_on_disk
from drafters.target import Target
from inference.generate import generate
from tests.folders import save_tiny_target

ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 2, "tie_word_embeddings": False}
    return save_tiny_target(tmp_path_factory.mktemp("target"), **sizes)


def test_a_layer_on_the_disk_changes_nothing(folder: Path) -> None:
    whole, spread = Target.load(folder, engine="reference"), Target.load(folder, device_map=ON_DISK)
    layer = spread.model.model.layers[1].mlp.up_proj.weight
    assert layer.is_meta
    assert spread.engine == "reference"
    assert Fingerprint.of(spread) == Fingerprint.of(whole)
    ids = torch.arange(3, 15).view(1, -1)
    zeros, places = torch.zeros_like(ids), torch.arange(12).view(1, -1)
    for ours, theirs in zip(
        whole.forward_batch(ids, zeros, places, Features((0,), last=True)),
        spread.forward_batch(ids, zeros, places, Features((0,), last=True)),
        strict=True,
    ):
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(theirs, ours, rtol=0, atol=0)
    drafter = build_drafter("ngram", {}, whole.shape)
    prompts = [ids[0].tolist(), [5, 6, 5, 6, 5]]
    outputs = [generate(t, drafter, prompts, max_new_tokens=12) for t in (whole, spread)]
    assert [o.ids for o in outputs[0]] == [o.ids for o in outputs[1]]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_all_layers_on_the_disk_are_read_when_they_are_asked_for(
    family: str, tmp_path: Path
) -> None:
    folder = save_tiny_target(tmp_path, family, num_hidden_layers=2)
    places = layers_on_disk(load_config(folder, "target"), "cpu")
    copies: dict[str, Any] = {"offload_folder": tmp_path / "copies"} if "moe" in family else {}
    whole = Target.load(folder, engine="reference")
    if copies:
        with pytest.raises(UserError, match="stays on the disk is a copy: give offload_folder"):
            Target.load(folder, device_map=places)
    spread = Target.load(folder, device_map=places, **copies)
    layers = decoder_layers(spread.model.base_model, 2)
    on_disk = {name for name, p in spread.model.named_parameters() if p.is_meta}
    assert len(on_disk) == len(list(layers.parameters()))
    assert all(p.is_meta for p in layers.parameters())
    assert Fingerprint.of(spread) == Fingerprint.of(whole)
    for left, right in zip(
        spread.layer_state(1).items(), whole.layer_state(1).items(), strict=True
    ):
        assert left[0] == right[0]
        torch.testing.assert_close(left[1], right[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "everywhere"}, "device_map is 'everywhere': give auto"),
        ({"device_map": "auto", "device": "cpu"}, "device and device_map exclude each other"),
        ({"device_map": "auto", "weights": "int8"}, "weights and device_map exclude each other"),
        ({"device_map": "auto", "engine": "fast"}, "engine fast holds all layers on one device"),
        ({"max_memory": {"cpu": 10**9}}, "max_memory belongs to device_map"),
        ({"offload_folder": "x"}, "offload_folder belongs to device_map"),
        ({"device_map": ON_DISK | {"lm_head": "disk"}}, "its head is not held by a device"),
        (
            {"device_map": ON_DISK | {"model.embed_tokens": "disk"}},
            "its embedding is not held by a device",
        ),
    ],
)
def test_what_cannot_be_spread_is_one_line(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Target.load(folder, **options)


def test_a_plan_takes_no_more_than_it_may(folder: Path) -> None:
    roomy = Target.load(folder, device_map="auto", max_memory={"cpu": "1GiB"})
    assert not any(p.is_meta for p in roomy.model.parameters())
    with pytest.raises(UserError, match="is not held by a device"):
        Target.load(folder, device_map="auto", max_memory={"cpu": "150KiB"})


@pytest.mark.slow
def test_what_only_a_spread_target_needs_is_not_imported_before() -> None:
    module = "transformers.integrations.accelerate"
    code = f"import sys, drafters.target; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

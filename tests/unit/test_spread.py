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
from drafters.settings import load
from drafters.spread import layers_on_disk
from drafters.target import Target
from inference.generate import generate
from tests.folders import save_tiny_target
from tests.unit.test_trainer import settings_of, trainer_of, weights
from training.lesson_settings import FeatureSettings
from training.options import TrainSettings
from training.served_target import load_target
from training.target_settings import AdapterSettings, SpreadSettings

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
        ({"device_map": "auto", "weights": "int8"}, "weights and device_map exclude each other"),
        ({"device_map": "auto", "engine": "fast"}, "engine fast holds all layers on one device"),
        ({"max_memory": {"cpu": 10**9}}, "max_memory belongs to device_map"),
        ({"offload_folder": "x"}, "offload_folder belongs to device_map"),
        ({"device_map": ON_DISK, "max_memory": {"cpu": "1GiB"}}, "max_memory is what a plan may"),
        (
            {"device_map": "auto", "max_memory": {7: "1GiB"}},
            "device 7 is not on this machine: give cpu",
        ),
        (
            {"device_map": ON_DISK | {"model.layers.1": "cuda:70"}},
            "device 'cuda:70' is not on this machine",
        ),
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


def test_every_process_on_cpus_has_the_cpu(folder: Path) -> None:
    """As accelerate numbers them: the second of two is told cpu:1."""
    for places in (None, ON_DISK):
        target = Target.load(folder, device="cpu:1", device_map=places)
        assert target.device == torch.device("cpu")
        assert target.embed(torch.tensor([3])).device == torch.device("cpu")


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


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_norm_and_head_on_the_disk_are_copied_to_the_device(
    tied: bool, tmp_path: Path
) -> None:
    folder = save_tiny_target(tmp_path, num_hidden_layers=2, tie_word_embeddings=tied)
    whole = Target.load(folder, engine="reference")
    spread = Target.load(folder, device_map=dict.fromkeys(ON_DISK, "disk"), device="cpu")
    assert all(p.is_meta for p in spread.model.parameters())
    ids = torch.arange(3, 15)
    hidden = torch.randn(2, whole.shape.hidden_size)
    torch.testing.assert_close(spread.embed(ids), whole.embed(ids), rtol=0, atol=0)
    torch.testing.assert_close(spread.head(hidden), whole.head(hidden), rtol=0, atol=0)
    assert spread.norm_state().keys() == whole.norm_state().keys()
    for name, weight in spread.norm_state().items():
        assert torch.equal(weight, whole.norm_state()[name])


def test_a_map_that_the_model_cannot_run_by_is_one_line(tmp_path: Path) -> None:
    """A tied head apart from its embedding: accelerate looks for a weight that no file holds."""
    folder = save_tiny_target(tmp_path, num_hidden_layers=2, tie_word_embeddings=True)
    with pytest.raises(UserError, match="does not run a few tokens"):
        Target.load(folder, device_map=ON_DISK | {"lm_head": "disk"})


def test_a_drafter_learns_the_same_from_a_target_on_the_disk(folder: Path, tmp_path: Path) -> None:
    places = SpreadSettings(device_map=dict.fromkeys(ON_DISK, "disk"))
    spread = load_target(settings_of(tmp_path, target=str(folder), spread=places), "cpu")
    assert all(p.is_meta for p in spread.model.parameters())
    learned: list[dict[str, torch.Tensor]] = []
    for name, target in (("whole", Target.load(folder, engine="reference")), ("spread", spread)):
        trainer = trainer_of(target, settings_of(tmp_path / name))
        assert trainer.train() is None
        learned.append(weights(trainer.drafter))
    assert learned[0].keys() == learned[1].keys()
    for name, value in learned[0].items():
        assert torch.equal(value, learned[1][name]), name


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"device_map": "everywhere"}, r"spread\.device_map is 'everywhere': give auto, balanced"),
        ({"device_map": 3}, r"spread\.device_map is 3: give auto"),
        ({"device_map": {"lm_head": [0]}}, r"spread\.device_map is \{'lm_head': \[0\]\}: give"),
        ({"device_map": "auto"}, r"give spread\.max_memory, such as \{1: 70GiB, 2: 70GiB\}"),
        ({"max_memory": {"0": "1GiB"}}, r"spread\.max_memory belongs to spread\.device_map"),
        ({"offload_folder": "x"}, r"spread\.offload_folder belongs to spread\.device_map"),
        (
            {"device_map": "auto", "max_memory": {"0": "much"}},
            r"spread\.max_memory is 'much' for device 0: give such as 70GiB",
        ),
    ],
)
def test_what_is_no_map_is_one_line(section: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SpreadSettings(**section)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            {"adapter": AdapterSettings(rank=4)},
            r"adapter\.rank is 4, and spread\.device_map is given too",
        ),
        (
            {"features": FeatureSettings(engine="vllm")},
            r"features\.engine is vllm, and spread\.device_map is given too",
        ),
    ],
)
def test_what_needs_the_layers_elsewhere_is_one_line(others: dict[str, Any], message: str) -> None:
    spread = SpreadSettings(device_map="auto", max_memory={"cpu": "1GiB"})
    with pytest.raises(UserError, match=message):
        TrainSettings(target="tiny", output="out", spread=spread, **others)


def test_settings_say_it_as_the_command_line_does() -> None:
    given = ["target=t", "output=o", "data.path=p", "spread.device_map=auto"]
    given += ["spread.max_memory={0: 70GiB, 1: 1000, cpu: 1.5 GB}"]
    loaded = load(TrainSettings, [], given).spread.arguments()
    sizes = {0: "70GiB", 1: 1000, "cpu": "1.5 GB"}
    assert loaded == {"device_map": "auto", "max_memory": sizes, "offload_folder": None}
    given[3:] = ["spread.device_map={model.layers.0: 1, lm_head: cpu}"]
    loaded = load(TrainSettings, [], given).spread.arguments()
    assert loaded["device_map"] == {"model.layers.0": 1, "lm_head": "cpu"}

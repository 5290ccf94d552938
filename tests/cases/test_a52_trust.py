"""Case A52 and its kind: a folder from the hub is somebody else's, and nothing in it is trusted."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.base import NeuralDrafter
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.registry import build_drafter
from drafters.stored import CONFIG, WEIGHTS
from drafters.target import Target
from drafters.untrusted import INDEX, refuse_devices
from drafters.warmstart import WarmStart
from tests.folders import save_tiny_target
from tests.tiny import tiny_target


class Bomb:
    """Make a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=3, hidden_size=32, intermediate_size=64)


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    options = {"draft_vocab_size": 32, "taps": [0, 1, 2]}
    drafter = build_drafter("eagle", options, target.shape)
    assert isinstance(drafter, NeuralDrafter)
    return save_drafter(drafter, tmp_path / "drafter", target)


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / CONFIG).read_text())
    edit(config)
    (folder / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl"])
def test_a_pickle_is_refused_and_not_read(folder: Path, suffix: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (folder / WEIGHTS).unlink()
    (folder / f"pytorch_model{suffix}").write_bytes(pickle.dumps(Bomb(marker)))
    for read in (load_drafter, WarmStart.read):
        with pytest.raises(UserError, match=rf"a pickle \(pytorch_model{suffix}\).* weights_only"):
            read(folder)
    assert not marker.exists()


def test_a_pickle_beside_the_weights_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (folder / "optimizer.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    load_drafter(folder)
    assert not (tmp_path / "ran").exists()


def test_the_way_to_convert_a_pickle_works(folder: Path, tmp_path: Path) -> None:
    """What the message says: weights_only reads tensors, and refuses anything that runs."""
    torch.save(load_file(folder / WEIGHTS), tmp_path / "x.pt")
    before = (folder / WEIGHTS).read_bytes()
    save_file(torch.load(tmp_path / "x.pt", weights_only=True), folder / WEIGHTS)
    assert load_file(folder / WEIGHTS).keys() == load_file(folder / WEIGHTS).keys()
    assert len((folder / WEIGHTS).read_bytes()) <= len(before)
    load_drafter(folder)


def test_pickled_causal_lms_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "model", num_hidden_layers=2)
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(UserError, match="a pickle"):
        load_drafter(folder)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        Target.load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_models_own_code_does_not_run(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "model", num_hidden_layers=2)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    change(
        folder,
        lambda config: config.update(
            model_type="evil",
            auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        ),
    )
    for load in (load_drafter, Target.load):
        with pytest.raises(UserError):
            load(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/x.safetensors", "a/b.safetensors"])
def test_an_index_stays_in_its_folder(name: str, tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "model", num_hidden_layers=2)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(UserError, match="is not a file in the folder"):
        load_drafter(folder)


def test_options_lead_to_no_other_model(folder: Path, target: Target) -> None:
    """A stored config could name a folder or a hub id for a family that reads other models."""
    change(folder, lambda c: c.update(drafter="draft_model", options={"model": "owner/name"}))
    with pytest.raises(UserError, match="draft_model has no weights to load"):
        load_drafter(folder, target)
    change(folder, lambda c: c.update(drafter="standalone", options={"model": "/etc"}))
    with pytest.raises(UserError, match="would have it read"):
        load_drafter(folder, target)


@pytest.mark.parametrize(
    "edit",
    [
        lambda c: c["shape"].update(hidden_size=2**40),
        lambda c: c["shape"].update(vocab_size=2**40) or c["options"].update(draft_vocab_size=0),
        lambda c: c["options"].update(layers=10**9),
        lambda c: c["options"].update(layers=10**5),
        lambda c: c["shape"].update(hidden_size=2**20),
        lambda c: c["options"].update(draft_vocab_size=0),
    ],
    ids=["width", "vocabulary", "layers", "some layers", "some width", "some vocabulary"],
)
def test_sizes_are_checked_before_memory_is_taken(
    folder: Path, edit: Callable[[dict[str, Any]], object]
) -> None:
    change(folder, edit)
    with pytest.raises(UserError, match=r"the config asks for|far more tensors|: at most"):
        load_drafter(folder)


def test_a_header_that_lies_about_its_size_is_refused(folder: Path) -> None:
    """Safetensors checks header and length against each other before a tensor is made."""
    path = folder / WEIGHTS
    content = path.read_bytes()
    path.write_bytes(struct.pack("<Q", 2**60) + content[8:])
    with pytest.raises(UserError, match="cannot be read"):
        load_drafter(folder)
    path.write_bytes(content[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        load_drafter(folder)


def test_bits_of_another_kind_are_no_weights(folder: Path) -> None:
    """A header of the right shape may call floats whole numbers: they were cast without a word."""
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name] = tensors[name].view(torch.int32)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(UserError, match=rf"{name} holds I32, the config asks for torch\.float32"):
        load_drafter(folder)


def test_a_folder_that_cannot_be_listed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read \(No such file"):
        refuse_devices(tmp_path / "nowhere")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, "tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_never_ends_is_not_read(name: str, kind: str, folder: Path, tmp_path: Path) -> None:
    model = save_tiny_target(tmp_path / "model", num_hidden_layers=2)
    for place, load in ((folder, load_drafter), (model, Target.load), (model, load_drafter)):
        (place / name).unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(place / name)
        else:
            (place / name).symlink_to("/dev/zero")
        with pytest.raises(UserError, match=r"is a device or a pipe|holds no config\.json"):
            load(place)


@pytest.mark.parametrize(
    "edit",
    [
        lambda c: c["shape"].pop("hidden_size"),
        lambda c: c["shape"].update(colour=1),
        lambda c: c["target"].pop("weights"),
        lambda c: c.update(options=3),
        lambda c: c.update(training=None),
    ],
)
def test_a_damaged_config_is_one_line(
    folder: Path, edit: Callable[[dict[str, Any]], object]
) -> None:
    change(folder, edit)
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        load_drafter(folder)


def test_a_config_too_large_to_be_one_is_not_parsed(folder: Path) -> None:
    with (folder / CONFIG).open("r+b") as stream:
        stream.truncate(2**25)
    with pytest.raises(UserError, match="not a file of this kind"):
        load_drafter(folder)

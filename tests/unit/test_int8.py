"""Int8 targets: what rounding does, and that trees of them are judged as chains are."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.fingerprint import Fingerprint
from drafters.growth import Dynamic
from drafters.int8 import Int8Linear, quantisation
from drafters.methods.eagle import EagleDrafter
from drafters.methods.none import NoDrafter
from drafters.target import Target
from inference import generate
from inference.facts import target_facts
from tests.folders import save_tiny_target
from tests.neural import away
from tests.tiny import prompts_of


def load(folder: Path, **options: str) -> Target:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the lean forward does not read int8
        return Target.load(folder, **options)


def test_rows_are_rounded_by_their_own_largest_number() -> None:
    linear = nn.Linear(3, 2)
    linear.weight.data = torch.tensor([[127.0, -63.4, 0.6], [0.0, 0.0, 0.0]])
    rounded = Int8Linear(linear)
    assert rounded.weight.tolist() == [[127, -63, 1], [0, 0, 0]]
    x = torch.tensor([[1.0, 2.0, 3.0]])
    torch.testing.assert_close(rounded(x), torch.tensor([[4.0, 0.0]]) + linear.bias)


@pytest.mark.slow
def test_an_int8_target_is_served_by_its_own_forward_and_drafted_for(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "t", num_hidden_layers=3)
    with pytest.warns(UserWarning, match="Int8Linear"):
        rounded = Target.load(folder, weights="int8")
    plain = load(folder)
    assert (plain.engine, rounded.engine) == ("fast", "reference")
    with pytest.raises(UserError, match="Int8Linear"):
        Target.load(folder, weights="int8", engine="fast")
    drafter = away(EagleDrafter, plain, 0.05, taps=[0, 1, 2])
    saved = save_drafter(drafter, tmp_path / "d", plain)
    with pytest.warns(UserWarning, match=r"quantised \(int8\) of the same model"):
        loaded = load_drafter(saved, rounded)
    prompts = prompts_of(9, 4)
    outputs = [
        generate(rounded, d, prompts, growth=Dynamic(6, 3, 3), max_new_tokens=16)
        for d in (NoDrafter(), loaded)
    ]
    assert [o.ids for o in outputs[0]] == [o.ids for o in outputs[1]]


def test_the_fingerprint_holds_base_and_quantisation(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "t")
    plain, rounded = (Fingerprint.of(load(folder, **o)) for o in ({}, {"weights": "int8"}))
    assert (plain.quantisation, rounded.quantisation) == ("", "int8")
    assert rounded.base == str(folder)
    assert plain.difference(rounded) == ("quantisation", "none", "int8")
    assert plain.same_model(rounded)


def test_figures_say_what_they_are_of(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "t")
    plain, rounded = (target_facts(load(folder, **o)) for o in ({}, {"weights": "int8"}))
    assert (plain["title"], plain["quantisation"]) == ("t", "")
    assert (rounded["title"], rounded["quantisation"]) == ("t, int8", "int8")
    assert plain["parameters"] == rounded["parameters"]


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_what_transformers_cannot_load_here_is_refused_by_name(method: str, tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "t")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"is quantised with {method}"):
        Target.load(folder)


def test_unknown_weights_and_devices_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="weights is 'int4': give int8"):
        Target.load(tmp_path / "nothing", weights="int4")
    for device in ("nonsense", "xpu:3"):
        with pytest.raises(UserError, match=f"device '{device}' is not on this machine: give cpu"):
            Target.load(tmp_path / "nothing", device=device)
    assert quantisation(object()) == ""

"""Medusa in foreign formats: literal files, exact round trips, and what vLLM would ignore."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafters.errors import UserError
from drafters.formats.convert import export_drafter, import_drafter
from drafters.formats.keys import expected
from drafters.formats.medusa_heads import DIALECTS, Names
from drafters.shape import TargetShape
from drafters.target import Target
from tests.foreign import (
    change,
    config_of,
    retensor,
    saved,
    shapes,
    small_target,
    state,
    vllm_medusa,
    write,
)

pytestmark = pytest.mark.slow

OWN = {"heads": 3, "draft_vocab_size": 0, "shared_head": False}
FILE = "medusa_lm_head.safetensors"
ORIGINAL = {
    **{f"{h}.0.linear.weight": [16, 16] for h in range(3)},
    **{f"{h}.0.linear.bias": [16] for h in range(3)},
    **{f"{h}.1.weight": [64, 16] for h in range(3)},
}
VLLM = {
    **{f"blocks.{h}.layers.0.weight": [16, 16] for h in range(3)},
    **{f"blocks.{h}.layers.0.bias": [16] for h in range(3)},
    **{f"lm_heads.{h}.weight": [64, 16] for h in range(3)},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return small_target()


def test_the_original_file(target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "medusa", **OWN)
    assert export_drafter(folder, "medusa", tmp_path / "out") == ()
    assert shapes(tmp_path / "out", FILE) == ORIGINAL
    config = config_of(tmp_path / "out")
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 1)
    assert config["base_model_name_or_path"] == "tiny-llama"


def test_vllms_file(target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "medusa", **{**OWN, "draft_vocab_size": 16})
    assert export_drafter(folder, "medusa-vllm", tmp_path / "out") == ()
    reduced = {name: ([16, 16] if "lm_heads" in name else size) for name, size in VLLM.items()}
    assert shapes(tmp_path / "out") == {**reduced, "token_map": [16]}
    assert config_of(tmp_path / "out") == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 16,
        "vocab_size": 64,
        "truncated_vocab_size": 16,
        "num_heads": 3,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "logit_scale": 1.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    kept = state(folder, target)["vocabulary.ids"]
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["token_map"], kept)


CHOICES = {
    "own": OWN,
    "shared": {"heads": 2, "draft_vocab_size": 0},
    "deep": {**OWN, "blocks": 2},
    "one": {**OWN, "heads": 1},
    "reduced": {"heads": 2, "draft_vocab_size": 16},
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["medusa", "medusa-vllm"])
def test_there_and_back(name: str, choice: str, target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "medusa", **CHOICES[choice])
    if (name, choice) == ("medusa", "reduced"):
        with pytest.raises(UserError, match=r"loses draft_vocab_size = 16 .* target's own"):
            export_drafter(folder, name, tmp_path / "out", target)
        return
    export_drafter(folder, name, tmp_path / "out")
    import_drafter(tmp_path / "out", tmp_path / "back", target)
    ours, back = state(folder, target), state(tmp_path / "back", target)
    assert ours.keys() == back.keys()
    assert all(torch.equal(ours[key], back[key]) for key in ours)
    assert config_of(folder)["options"] == config_of(tmp_path / "back")["options"]


def test_a_reduced_head_is_filled_up_with_the_targets_rows(target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "medusa", heads=2, draft_vocab_size=16)
    with pytest.raises(UserError, match="give --target too"):
        export_drafter(folder, "medusa", tmp_path / "out", allow_loss=True)
    assert export_drafter(folder, "medusa", tmp_path / "out", target, allow_loss=True)
    rows = load_file(tmp_path / "out" / FILE)["1.1.weight"]
    ours = state(folder, target)
    kept = ours["vocabulary.ids"]
    wanted = target.head_rows(torch.arange(64)).to(torch.bfloat16)
    wanted[kept] = ours["outputs.0.weight"].to(torch.bfloat16)
    assert torch.equal(rows, wanted)


def test_vllm_would_ignore_an_original_file(target: Target, tmp_path: Path) -> None:
    """So this project refuses what vLLM loads as random heads."""
    folder = saved(target, tmp_path / "d", "medusa", **OWN)
    export_drafter(folder, "medusa", tmp_path / "fd")
    export_drafter(folder, "medusa-vllm", tmp_path / "vllm")
    parameters = set(VLLM)
    assert vllm_medusa(shapes(tmp_path / "fd", FILE), parameters) == {}
    found = vllm_medusa(shapes(tmp_path / "vllm"), parameters)
    assert set(found.values()) == parameters
    assert len(found) == len(shapes(tmp_path / "vllm"))
    with pytest.raises(UserError, match=r"not in the format medusa-vllm; .* it is medusa"):
        import_drafter(tmp_path / "fd", tmp_path / "back", target, "medusa-vllm")


def test_the_nested_names_are_read(target: Target, tmp_path: Path) -> None:
    keys = {
        **{f"medusa_heads.{h}.medusa_layers.0.linear.weight": [16, 16] for h in range(2)},
        **{f"medusa_heads.{h}.medusa_layers.0.linear.bias": [16] for h in range(2)},
        **{f"medusa_heads.{h}.lm_head.weight": [64, 16] for h in range(2)},
    }
    config = {"num_medusa_heads": 2, "num_medusa_layers": 1}
    folder = write(tmp_path / "theirs", config, keys)
    assert import_drafter(folder, tmp_path / "ours", target) == ()
    given, ours = load_file(folder / "model.safetensors"), state(tmp_path / "ours", target)
    assert torch.equal(given["medusa_heads.1.lm_head.weight"], ours["outputs.1.weight"])


WRONG = {
    "heads": ({"num_heads": 2}, {}, r"unused tensors \['blocks.2"),
    "more heads": ({"num_heads": 99}, {}, "num_heads is 99, with 10 tensors"),
    "no bias": ({"medusa_fc_bias": False}, {}, "medusa_fc_bias is false"),
    "scale": ({"logit_scale": 0.5}, {}, "logit_scale is 0.5"),
    "no map": ({}, {"token_map": None}, "16 of the target's 64 ids and token_map is missing"),
    "offsets": ({}, {"token_map": torch.full((16,), 3)}, "ascending ids from 0 to 63"),
    "out of range": ({}, {"token_map": torch.arange(16) + 60}, "runs from 60 to 75"),
    "length": ({}, {"token_map": torch.arange(3)}, r"token_map is \[3\], not \[16\]"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_vllm_file_is_refused(what: str, target: Target, tmp_path: Path) -> None:
    config, tensors, message = WRONG[what]
    folder = saved(target, tmp_path / "d", "medusa", **{**OWN, "draft_vocab_size": 16})
    export_drafter(folder, "medusa-vllm", tmp_path / "out")
    change(tmp_path / "out", **config)
    retensor(tmp_path / "out", **tensors)
    with pytest.raises(UserError, match=message):
        import_drafter(tmp_path / "out", tmp_path / "back", target)


def test_sizes_of_real_heads() -> None:
    """medusa-vicuna-7b-v1.3: five heads of one block."""
    shape = TargetShape(4096, 11008, 32, 32, 32, 128, 32000, 2048)
    options = {"heads": 5, "blocks": 1, "draft_vocab_size": 0, "shared_head": False}
    names = Names("{h}.{b}.linear.{x}", "{h}.{n}.weight")
    assert expected("medusa", options, shape, names.table(options)) == {
        **{f"{h}.0.linear.weight": (4096, 4096) for h in range(5)},
        **{f"{h}.0.linear.bias": (4096,) for h in range(5)},
        **{f"{h}.1.weight": (32000, 4096) for h in range(5)},
    }
    assert [d.name for d in DIALECTS] == ["medusa", "medusa-trt"]

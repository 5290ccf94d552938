"""A folder with an adapter in PEFT's format is a target: its base with the adapter merged in."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drafters.adapter import CONFIG, WEIGHTS
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.fingerprint import Fingerprint
from drafters.methods.medusa import MedusaDrafter
from drafters.target import Target
from inference import generate
from tests.folders import save_tiny_target, tiny_tokenizer
from tests.neural import away
from training.reader import WeightlessReader

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
IDS = torch.arange(5, 23).view(2, 9)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("adapter") / "base", **SIZES)


def tuned(base: Path, folder: Path, **settings: Any) -> tuple[Path, torch.Tensor]:
    """Save an adapter as PEFT does; return its folder and the logits that PEFT itself gives."""
    torch.manual_seed(3)
    loader: Any = AutoModelForCausalLM
    given = {"target_modules": "all-linear", "r": 4, "task_type": "CAUSAL_LM", **settings}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # PEFT's own
        model: Any = get_peft_model(loader.from_pretrained(base), LoraConfig(**given)).eval()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        return folder, model(IDS).logits


@pytest.fixture(scope="module")
def folder(base: Path) -> Path:
    return tuned(base, base.parent / "plain")[0]


def edited(folder: Path, place: Path, **changes: object) -> Path:
    """Copy an adapter with other settings."""
    shutil.copytree(folder, place)
    config = json.loads((place / CONFIG).read_text())
    (place / CONFIG).write_text(json.dumps(config | changes))
    return place


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True, "use_rslora": True, "alpha_pattern": {"q_proj": 7}},
        {"target_modules": ["v_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
    ],
    ids=["plain", "scaled", "embedding"],
)
def test_the_target_is_what_peft_computes(
    base: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    place, logits = tuned(base, tmp_path / "adapter", **settings)
    target = Target.load(place)
    assert target.engine == "fast"
    torch.testing.assert_close(target.model(IDS).logits, logits, atol=1e-3, rtol=1e-4)
    bare = Target.load(base).model(IDS).logits
    assert (bare - logits).abs().max() > 1
    assert not any(p.requires_grad for p in target.model.parameters())


def test_tokenizer_and_ends_come_from_the_base_where_the_folder_has_none(
    base: Path, folder: Path, tmp_path: Path
) -> None:
    for found in (Target.load(folder), WeightlessReader.load(str(folder))):
        assert found.eos_ids == {2}
        assert found.tokenizer.chat_template == tiny_tokenizer().chat_template
    own = shutil.copytree(folder, tmp_path / "own")
    tiny_tokenizer(template=False).save_pretrained(own)
    assert Target.load(own).tokenizer.chat_template is None


@pytest.mark.slow
def test_it_is_one_target_in_any_dtype_and_another_than_its_base(
    base: Path, folder: Path, tmp_path: Path
) -> None:
    target, bare = Target.load(folder), Target.load(base)
    own = Fingerprint.of(target)
    assert own.difference(Fingerprint.of(Target.load(folder, dtype="bfloat16"))) is None
    assert own.base == str(base)
    assert target.folder == folder
    for one, other in ((target, bare), (bare, target)):
        drafter = save_drafter(away(MedusaDrafter, one, 0.05), tmp_path / "d", one)
        load_drafter(drafter, one)
        with pytest.raises(UserError, match=r"made for another target .*: its adapter is "):
            load_drafter(drafter, other)


def test_adapted_weights_can_be_rounded_as_any_others(folder: Path) -> None:
    found = Fingerprint.of(Target.load(folder, weights="int8", engine="reference"))
    assert found.quantisation == "int8"
    assert found.adapter


def test_decoding_is_lossless_relative_to_base_and_adapter(folder: Path) -> None:
    target = Target.load(folder)
    prompts = [[5, 6, 7], [9, 8]]
    plain = target.model.generate(torch.tensor(prompts[:1]), max_new_tokens=8, do_sample=False)
    drafter = away(MedusaDrafter, target, 0.05)
    outputs = generate(target, drafter, prompts, max_new_tokens=8)
    wanted = plain[0, 3:].tolist()
    assert outputs[0].ids[: len(wanted)] == wanted


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "its peft_type is 'IA3': only LORA"),
        ({"base_model_name_or_path": None}, "names no base"),
        ({"base_model_name_or_path": "/nowhere/base"}, "its base '/nowhere/base': no such folder"),
        ({"init_lora_weights": "pissa"}, "its init_lora_weights is 'pissa'"),
        ({"layer_replication": [[0, 1]]}, "its layer_replication is"),
        ({"r": 8}, "tensors differ from what its config asks of its base, such as model.layers.0"),
        ({"r": 10**9}, "its tensors hold no updates of rank 1000000000"),
        ({"target_modules": ["q_proj"]}, "tensors differ"),
        ({"target_modules": ["nothing"]}, "does not merge into its base: Target modules"),
        ({"lora_alpha": "x"}, "does not merge into its base"),
    ],
    ids=str,
)
def test_what_does_not_merge_is_one_line(
    folder: Path, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    place = edited(folder, tmp_path / "adapter", **changes)
    with pytest.raises(UserError) as refused:
        Target.load(place)
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_files_are_not_trusted(base: Path, folder: Path, tmp_path: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "adapter")
    tensors = load_file(place / WEIGHTS)
    first = sorted(tensors)[0]
    save_file({**tensors, first: tensors[first] * float("nan")}, place / WEIGHTS)
    with pytest.raises(UserError, match="does not merge into its base: NaNs"):
        Target.load(place)
    (place / WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(UserError, match="cannot be read"):
        Target.load(place)
    (place / WEIGHTS).rename(place / "adapter_model.bin")
    with pytest.raises(UserError, match="its weights are a pickle"):
        Target.load(place)
    loop = edited(folder, tmp_path / "loop", base_model_name_or_path=str(folder))
    with pytest.raises(UserError, match="is an adapter too: merge that one first"):
        Target.load(loop)
    other = save_tiny_target(tmp_path / "other", **{**SIZES, "hidden_size": 64})
    moved = edited(folder, tmp_path / "moved", base_model_name_or_path=str(other))
    with pytest.raises(UserError, match="it was made for another model"):
        Target.load(moved)

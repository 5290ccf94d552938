"""P-EAGLE and MTP to the speculators library's files and back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafters.errors import UserError
from drafters.formats.convert import export_drafter, import_drafter
from drafters.target import Target
from tests.foreign import (
    NARROW,
    WIDE,
    change,
    config_of,
    ids_of,
    retensor,
    saved,
    shapes,
    small_target,
    state,
    under,
)

NORMED = {**NARROW, "self_attn.q_norm.weight": [4], "self_attn.k_norm.weight": [4]}
PEAGLE = {
    "embed_tokens.weight": [64, 16],
    "fc.weight": [16, 48],
    **under("layers.0", WIDE),
    **under("layers.1", NARROW),
    "norm.weight": [16],
    "lm_head.weight": [16, 16],
    "mask_hidden": [1, 1, 48],
    "d2t": [16],
    "t2d": [64],
}
MTP = {
    **under("mtp_layers.0", NORMED),
    "mtp_layers.0.token_layernorm.weight": [16],
    "mtp_layers.0.hidden_layernorm.weight": [16],
    "mtp_layers.0.final_layernorm.weight": [16],
    "mtp_layers.0.input_proj.weight": [16, 32],
}


@pytest.fixture(scope="module")
def target() -> Target:
    return small_target()


def peagle(target: Target, place: Path, **options: object) -> Path:
    return saved(target, place, "peagle", **{"layers": 2, "draft_vocab_size": 16, **options})


def mtp(target: Target, place: Path, **options: object) -> Path:
    whole = {"draft_vocab_size": 0, "norm_output": True, "qk_norm": True}
    return saved(target, place, "mtp", **{**whole, **options})


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 16])
@pytest.mark.parametrize("make", [peagle, mtp])
def test_round_trips_are_bit_exact(target: Target, tmp_path: Path, make, kept: int) -> None:
    ours = make(target, tmp_path / "ours", draft_vocab_size=kept if make is peagle else 0)
    assert not export_drafter(ours, "speculators", tmp_path / "theirs", target)
    assert not import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    before, after = state(ours, target), state(tmp_path / "back", target)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    options = config_of(tmp_path / "back")["options"]
    assert options["unroll"] == config_of(ours)["options"]["unroll"]


def test_names_shapes_and_flags_of_peagle(target: Target, tmp_path: Path) -> None:
    ours = peagle(target, tmp_path / "ours")
    export_drafter(ours, "speculators", tmp_path / "theirs", target)
    assert shapes(tmp_path / "theirs") == PEAGLE
    config, tensors = config_of(tmp_path / "theirs"), load_file(ours / "model.safetensors")
    assert config["architectures"] == ["PEagleSpeculator"]
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "peagle"
    assert config["tie_word_embeddings"] is False
    assert config["norm_before_residual"] is False
    written = load_file(tmp_path / "theirs" / "model.safetensors")
    place = config["mask_token_id"]
    assert not bool(written["t2d"][place])
    assert torch.equal(written["embed_tokens.weight"][place], tensors["unknown_token"])
    assert torch.equal(written["d2t"], ids_of(*tensors["vocabulary.ids"].tolist())["d2t"])
    export_drafter(ours, "vllm", tmp_path / "vllm", target)  # which reads the same file
    assert config_of(tmp_path / "vllm") == config


def test_names_shapes_and_flags_of_mtp(target: Target, tmp_path: Path) -> None:
    export_drafter(mtp(target, tmp_path / "ours"), "speculators", tmp_path / "theirs", target)
    assert shapes(tmp_path / "theirs") == MTP
    config = config_of(tmp_path / "theirs")
    assert (config["architectures"], config["num_nextn_predict_layers"]) == (["MTPDraftModel"], 1)
    assert config["transformer_layer_config"]["num_hidden_layers"] == 8
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


def test_what_mtp_files_have_no_place_for(target: Target, tmp_path: Path) -> None:
    for number, (options, said) in enumerate(
        [
            ({"modules": 2}, "modules = 2"),
            ({"norm_output": False}, "norm_output=true"),
            ({"qk_norm": False}, "qk_norm=true"),
            ({"draft_vocab_size": 16}, "loses draft_vocab_size = 16"),
        ]
    ):
        ours = mtp(target, tmp_path / str(number), **options)
        with pytest.raises(UserError, match=said):
            export_drafter(ours, "speculators", tmp_path / "theirs", target)


def test_files_that_do_not_fit_are_refused(target: Target, tmp_path: Path) -> None:
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    export_drafter(peagle(target, tmp_path / "ours"), "speculators", theirs, target)
    change(theirs, mask_token_id=64)
    with pytest.raises(UserError, match="mask_token_id is 64: give 0 to 63"):
        import_drafter(theirs, back, target)
    change(theirs, mask_token_id=0)
    with pytest.raises(UserError, match="which is not the target's own"):
        import_drafter(theirs, back, target)
    retensor(theirs, mask_hidden=torch.ones(1, 1, 16))
    with pytest.raises(UserError, match=r"mask_hidden is .1, 1, 16., not .1, 1, 48."):
        import_drafter(theirs, back, target)
    retensor(theirs, mask_hidden=None)
    with pytest.raises(UserError, match="mask_hidden is missing"):
        import_drafter(theirs, back, target)
    module = tmp_path / "mtp"
    export_drafter(mtp(target, tmp_path / "mine"), "speculators", module, target)
    change(module, num_nextn_predict_layers=2)
    with pytest.raises(UserError, match="num_nextn_predict_layers is not 1"):
        import_drafter(module, back, target)
    change(module, num_nextn_predict_layers=1, transformer_layer_config={"model_type": "llama"})
    with pytest.raises(UserError, match="those of qwen3 have a place"):
        import_drafter(module, back, target)

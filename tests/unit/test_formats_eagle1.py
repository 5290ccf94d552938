"""EAGLE-1 to other formats and back."""

from pathlib import Path

import pytest
import torch

from drafters.errors import UserError
from drafters.formats.convert import export_drafter, import_drafter
from drafters.target import Target
from tests.foreign import change, config_of, retensor, saved, shapes, small_target, state

BIAS = {"fc.bias": [16]}
FILE = {
    "fc.weight": [16, 32],
    "layers.0.self_attn.q_proj.weight": [16, 16],
    "layers.0.self_attn.k_proj.weight": [8, 16],
    "layers.0.self_attn.v_proj.weight": [8, 16],
    "layers.0.self_attn.o_proj.weight": [16, 16],
    "layers.0.post_attention_layernorm.weight": [16],
    "layers.0.mlp.gate_proj.weight": [32, 16],
    "layers.0.mlp.up_proj.weight": [32, 16],
    "layers.0.mlp.down_proj.weight": [16, 32],
}


@pytest.fixture(scope="module")
def target() -> Target:
    return small_target()


@pytest.mark.parametrize("name", ["safeai", "sglang"])
def test_round_trips_are_bit_exact(target: Target, tmp_path: Path, name: str) -> None:
    ours, theirs = saved(target, tmp_path / "ours", "eagle1"), tmp_path / "theirs"
    assert not export_drafter(ours, name, theirs)
    assert shapes(theirs) == FILE | BIAS
    assert config_of(theirs)["bias"] is True
    assert not import_drafter(theirs, tmp_path / "back", target)
    before, after = state(ours, target), state(tmp_path / "back", target)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


def test_vllm_has_no_bias(target: Target, tmp_path: Path) -> None:
    ours, theirs = saved(target, tmp_path / "ours", "eagle1"), tmp_path / "theirs"
    with pytest.raises(UserError, match="bias of fc"):
        export_drafter(ours, "vllm", theirs)
    assert export_drafter(ours, "vllm", theirs, allow_loss=True)
    assert shapes(theirs) == FILE
    assert config_of(theirs)["bias"] is False
    retensor(ours, fusion__bias=torch.zeros(16, dtype=torch.bfloat16))
    assert not export_drafter(ours, "vllm", tmp_path / "without")
    import_drafter(tmp_path / "without", tmp_path / "back", target)
    assert "fusion.bias" not in state(tmp_path / "back", target)


@pytest.mark.parametrize("name", ["safeai", "sglang", "vllm"])
def test_nothing_is_lost_where_the_map_has_no_bias(
    target: Target, tmp_path: Path, name: str
) -> None:
    ours, theirs = saved(target, tmp_path / "ours", "eagle1", fusion_bias=False), tmp_path / "to"
    assert not export_drafter(ours, name, theirs)
    assert shapes(theirs) == (FILE | BIAS if name == "sglang" else FILE)
    assert not import_drafter(theirs, tmp_path / "back", target)
    before, after = state(ours, target), state(tmp_path / "back", target)
    if name == "sglang":  # whose reader makes up a bias that the file lacks
        assert not bool(after.pop("fusion.bias").any())
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


def test_a_reduced_vocabulary_is_lost(target: Target, tmp_path: Path) -> None:
    ours = saved(target, tmp_path / "ours", "eagle1", draft_vocab_size=16)
    with pytest.raises(UserError, match="draft_vocab_size = 16"):
        export_drafter(ours, "safeai", tmp_path / "theirs")


def test_a_bias_that_the_config_asks_for_must_be_there(target: Target, tmp_path: Path) -> None:
    ours, theirs = saved(target, tmp_path / "ours", "eagle1"), tmp_path / "theirs"
    export_drafter(ours, "vllm", theirs, allow_loss=True)
    change(theirs, bias=None)
    with pytest.raises(UserError, match="bias absent means true"):
        import_drafter(theirs, tmp_path / "back", target)

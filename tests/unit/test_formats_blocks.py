"""DFlash and DSpark to other formats and back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafters.errors import UserError
from drafters.formats.convert import export_drafter, import_drafter
from drafters.target import Target
from tests.foreign import change, config_of, retensor, saved, shapes, small_target, state

WAYS = [
    ("dflash", "zlab"),
    ("dflash", "speculators"),
    ("dspark", "deepspec"),
    ("dspark", "speculators"),
]
LAYER = {
    "input_layernorm.weight": [16],
    "post_attention_layernorm.weight": [16],
    "self_attn.q_proj.weight": [16, 16],
    "self_attn.k_proj.weight": [8, 16],
    "self_attn.v_proj.weight": [8, 16],
    "self_attn.o_proj.weight": [16, 16],
    "self_attn.q_norm.weight": [4],
    "self_attn.k_norm.weight": [4],
    "mlp.gate_proj.weight": [32, 16],
    "mlp.up_proj.weight": [32, 16],
    "mlp.down_proj.weight": [16, 32],
}
BLOCK = {
    "fc.weight": [16, 32],
    "hidden_norm.weight": [16],
    **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()},
    "norm.weight": [16],
    "lm_head.weight": [16, 16],
    "d2t": [16],
    "t2d": [64],
    "embed_tokens.weight": [64, 16],
}
SPARKS = {
    "markov_head.markov_w1.weight": [64, 4],
    "markov_head.markov_w2.weight": [16, 4],
    "confidence_head.proj.weight": [1, 20],
    "confidence_head.proj.bias": [1],
}


@pytest.fixture(scope="module")
def target() -> Target:
    return small_target()


def drafter(target: Target, place: Path, family: str, **options: object) -> Path:
    sparks = {"markov_rank": 4} if family == "dspark" else {}
    full = {"taps": [1, 5], "draft_vocab_size": 16, "qk_norm": True, **sparks, **options}
    return saved(target, place, family, **full)


@pytest.mark.parametrize(("family", "name"), WAYS)
@pytest.mark.parametrize("kept", [0, 16])
def test_round_trips_are_bit_exact(
    target: Target, tmp_path: Path, family: str, name: str, kept: int
) -> None:
    ours = drafter(target, tmp_path / "ours", family, draft_vocab_size=kept)
    assert not export_drafter(ours, name, tmp_path / "theirs", target)
    assert not import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    before, after = state(ours, target), state(tmp_path / "back", target)
    if family == "dspark" and not kept:  # the row of ids that are not kept serves nobody
        for tensors in (before, after):
            tensors["correction.before.weight"] = tensors["correction.before.weight"][:64]
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    options = config_of(tmp_path / "back")["options"]
    assert options["slots"] == config_of(ours)["options"]["slots"]
    assert options["taps"] == [1, 5]


@pytest.mark.parametrize(("family", "name"), WAYS)
def test_names_shapes_and_both_numberings(
    target: Target, tmp_path: Path, family: str, name: str
) -> None:
    theirs = tmp_path / "theirs"
    export_drafter(drafter(target, tmp_path / "ours", family), name, theirs, target)
    assert shapes(theirs) == BLOCK | (SPARKS if family == "dspark" else {})
    config = config_of(theirs)
    assert config["block_size"] == (5 if family == "dflash" else 4)
    assert config["tie_word_embeddings"] is False
    if name == "speculators":
        assert config["aux_hidden_state_layer_ids"] == [2, 6]
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    else:
        assert config["dflash_config"]["target_layer_ids"] == [1, 5]


def test_the_learned_vector_is_the_row_of_an_id_that_is_not_drafted(
    target: Target, tmp_path: Path
) -> None:
    ours = drafter(target, tmp_path / "ours", "dflash")
    export_drafter(ours, "zlab", tmp_path / "theirs", target)
    tensors, place = (
        load_file(tmp_path / "theirs/model.safetensors"),
        config_of(tmp_path / "theirs")["mask_token_id"],
    )
    assert not bool(tensors["t2d"][place])
    mask = load_file(ours / "model.safetensors")["mask"]
    assert torch.equal(tensors["embed_tokens.weight"][place], mask)


def test_a_published_flat_file_borrows_embedding_and_head(target: Target, tmp_path: Path) -> None:
    ours = drafter(target, tmp_path / "ours", "dflash", draft_vocab_size=0)
    theirs = tmp_path / "theirs"
    export_drafter(ours, "zlab", theirs, target)
    retensor(theirs, embed_tokens__weight=None, lm_head__weight=None)
    assert not import_drafter(theirs, tmp_path / "back", target)
    found = state(tmp_path / "back", target)
    assert torch.equal(found["head.weight"], target.head_rows(torch.arange(64)))
    assert torch.equal(found["mask"], target.embed(torch.tensor([63]))[0])


def test_layers_without_norms_on_queries_are_refused(target: Target, tmp_path: Path) -> None:
    ours = drafter(target, tmp_path / "ours", "dflash", qk_norm=False)
    with pytest.raises(UserError, match="qk_norm=true"):
        export_drafter(ours, "zlab", tmp_path / "theirs", target)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_layer_ids": None, "dflash_config": None}, "which layers are tapped"),
        ({"mask_token_id": 64, "dflash_config": None}, "mask_token_id is 64: give 0 to 63"),
        ({"block_size": 1, "dflash_config": None}, "block_size is 1"),
        ({"vocab_size": 65}, "made for a target"),
    ],
)
def test_bad_configs(target: Target, tmp_path: Path, changes: dict[str, object], said: str) -> None:
    theirs = tmp_path / "theirs"
    export_drafter(drafter(target, tmp_path / "ours", "dflash"), "zlab", theirs, target)
    change(theirs, **changes)
    with pytest.raises(UserError, match=said):
        import_drafter(theirs, tmp_path / "back", target)


def test_a_pickled_mask_is_refused(target: Target, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    export_drafter(drafter(target, tmp_path / "ours", "dflash"), "zlab", theirs, target)
    (theirs / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UserError, match="pickle"):
        import_drafter(theirs, tmp_path / "back", target)


def test_markov_rows_that_are_not_shared_are_refused(target: Target, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    export_drafter(drafter(target, tmp_path / "ours", "dspark"), "deepspec", theirs, target)
    retensor(theirs, markov_head__markov_w1__weight=torch.randn(64, 4))
    with pytest.raises(UserError, match="rows of their own"):
        import_drafter(theirs, tmp_path / "back", target)

"""EAGLE-3 in foreign formats: literal files, exact round trips, what engines make of the names."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from drafters.base import Features
from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.formats.convert import export_drafter, import_drafter
from drafters.formats.eagle3 import Names, table
from drafters.formats.keys import expected
from drafters.shape import TargetShape, usual_taps
from drafters.target import Target
from inference import generate
from tests.foreign import (
    LLAMA,
    NARROW,
    SIZES,
    WIDE,
    change,
    config_of,
    ids_of,
    saved,
    sglang_eagle3,
    shapes,
    small_target,
    state,
    under,
    vllm_eagle3,
    write,
)
from tests.tiny import prompts_of, tiny_model

pytestmark = pytest.mark.slow

REDUCED = {"draft_vocab_size": 16, "unroll": 3}
TOP = {"fc.weight": [16, 48], "norm.weight": [16], "lm_head.weight": [16, 16]}
TABLES = {"d2t": [16], "t2d": [64]}
FILES = {
    "safeai": {**TOP, **TABLES, **under("midlayer", WIDE)},
    "vllm": {**TOP, **TABLES, **under("midlayer", WIDE)},
    "sglang": {**TOP, **TABLES, **under("midlayer", WIDE)},
    "speculators": {
        **TOP,
        **TABLES,
        **under("layers.0", WIDE),
        "embed_tokens.weight": [64, 16],
    },
}
CHOICES = {
    "plain": {},
    "full": {"draft_vocab_size": 0},
    "eagle3.1": {"tap_norm": True, "norm_output": True},
    "residual": {"norm_before_residual": True},
    "two_layers": {"layers": 2},
    "one_tap": {"taps": [6], "tap_norm": True},
    "top_tap": {"taps": [0, 7]},
    "qk_norm": {"qk_norm": True},
}
REFUSED = {("safeai", "two_layers")} | {(name, "qk_norm") for name in ("safeai", "vllm", "sglang")}


@pytest.fixture(scope="module")
def target() -> Target:
    return small_target()


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_the_literal_table(name: str, target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "eagle", **REDUCED)
    assert export_drafter(folder, name, tmp_path / "out", target) == ()
    assert shapes(tmp_path / "out") == FILES[name]
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    tensors = load_file(tmp_path / "out/model.safetensors")
    kept = state(folder, target)["vocabulary.ids"]
    assert tensors.pop("d2t").tolist() == [int(x) - i for i, x in enumerate(kept)]
    mask = tensors.pop("t2d")
    assert mask.dtype == torch.bool
    assert torch.equal(mask.nonzero()[:, 0], kept)
    for key, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16, key
        assert bool(torch.isfinite(tensor).all()), key


def test_flat_configs_say_everything(target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "eagle", **REDUCED)
    export_drafter(folder, "vllm", tmp_path / "out")
    assert config_of(tmp_path / "out") == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": target.shape.norm_epsilon,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "vocab_size": 64,
        "draft_vocab_size": 16,
        "target_hidden_size": 16,
        "num_target_layers": 8,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "use_aux_hidden_state": True,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "norm_output": False,
        },
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def test_the_speculators_config(target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "eagle", qk_norm=True, **REDUCED)
    export_drafter(folder, "speculators", tmp_path / "out", target)
    config = config_of(tmp_path / "out")
    assert "model_type" not in config
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    assert config["transformer_layer_config"]["vocab_size"] == 64
    assert config["draft_vocab_size"] == 16
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert config[name] is False
    inner = config["speculators_config"]
    assert inner["proposal_methods"][0]["speculative_tokens"] == 3
    assert inner["verifier"] == {
        "name_or_path": "tiny-llama",
        "architectures": ["LlamaForCausalLM"],
    }
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(
        tensors["embed_tokens.weight"], target.embed(torch.arange(64)).to(torch.bfloat16)
    )


def test_speculators_needs_the_target(target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "eagle", **REDUCED)
    with pytest.raises(UserError, match="the embedding of the target's: give --target"):
        export_drafter(folder, "speculators", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", FILES)
def test_there_and_back_is_the_same_bit_for_bit(
    name: str, choice: str, target: Target, tmp_path: Path
) -> None:
    folder = saved(target, tmp_path / "d", "eagle", **{**REDUCED, **CHOICES[choice]})
    if (name, choice) in REFUSED:
        with pytest.raises(UserError, match="has no place for"):
            export_drafter(folder, name, tmp_path / "out", target, allow_loss=True)
        return
    export_drafter(folder, name, tmp_path / "out", target, allow_loss=True)
    import_drafter(tmp_path / "out", tmp_path / "back", target)
    ours, back = state(folder, target), state(tmp_path / "back", target)
    assert ours.keys() == back.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, back[key]), key
    before, after = (config_of(place) for place in (folder, tmp_path / "back"))
    # how it was trained is not in the file, what it computes is
    training = {"init_layer", "init_embedding", "init_fusion", "init_head", "unroll", "head"}
    for option in before["options"].keys() - training:
        assert after["options"][option] == before["options"][option], option
    assert after["shape"] == before["shape"]


def test_through_every_format_in_turn(target: Target, tmp_path: Path) -> None:
    """So any two formats carry the same information, and the drafter still drafts."""
    first = saved(target, tmp_path / "0", "eagle", **REDUCED)
    folder = first
    for turn, name in enumerate([*FILES, *FILES], start=1):
        export_drafter(folder, name, tmp_path / f"{name}{turn}", target)
        folder = tmp_path / str(turn)
        import_drafter(tmp_path / f"{name}{turn}", folder, target, name)
    ours, last = state(first, target), state(folder, target)
    assert all(torch.equal(ours[key], last[key]) for key in ours)


def test_an_imported_drafter_drafts(target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "eagle", **REDUCED)
    export_drafter(folder, "vllm", tmp_path / "out")
    import_drafter(tmp_path / "out", tmp_path / "back", target)
    prompts = prompts_of(7, 4, vocab_size=64)
    outputs = [
        generate(target, load_drafter(place, target), prompts, max_new_tokens=6)
        for place in (folder, tmp_path / "back")
    ]
    assert [x.ids for x in outputs[0]] == [x.ids for x in outputs[1]]


LOST = {
    ("safeai", "residual"): "norm_before_residual = true",
    ("safeai", "eagle3.1"): "tap_norm = true .*; norm_output = true",
    ("safeai", "top_tap"): r"taps = \[0, 7\] \(its code reads the outputs of layers \[1, 3, 4\]",
    ("sglang", "residual"): "norm_before_residual = true",
}


@pytest.mark.parametrize(("name", "choice"), LOST)
def test_what_a_reader_ignores_is_said(
    name: str, choice: str, target: Target, tmp_path: Path
) -> None:
    folder = saved(target, tmp_path / "d", "eagle", **{**REDUCED, **CHOICES[choice]})
    with pytest.raises(UserError, match=f"loses {LOST[name, choice]}.* --allow-loss"):
        export_drafter(folder, name, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert export_drafter(folder, name, tmp_path / "out", allow_loss=True)


def test_both_lists_name_the_tapped_tensors(tmp_path: Path) -> None:
    """vLLM's ids index hidden_states, SGLang's are one less; the target taps just these."""
    model = tiny_model(**SIZES)
    target = Target(model, name="tiny")
    folder = saved(target, tmp_path / "d", "eagle", taps=[0, 3, 5], **REDUCED)
    export_drafter(folder, "sglang", tmp_path / "out")
    config = config_of(tmp_path / "out")
    upper = config["eagle_aux_hidden_state_layer_ids"]
    assert [k - 1 for k in upper] == config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    ids = torch.tensor(prompts_of(9, vocab_size=64))
    states = model(ids, output_hidden_states=True).hidden_states
    position = torch.arange(9).expand(1, 9)
    taps, _ = target.forward_batch(ids, torch.zeros_like(ids), position, Features((0, 3, 5)))
    assert taps is not None
    wanted = torch.cat([states[k] for k in upper], -1)
    torch.testing.assert_close(taps, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("layers", [1, 2])
def test_vllms_loader_finds_every_parameter(layers: int, target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "eagle", **REDUCED, layers=layers)
    wanted = {"model.fc.weight", "model.norm.weight", "lm_head.weight", "draft_id_to_target_id"}
    wanted |= set(under("model.layers.0", WIDE))
    wanted |= set(under("model.layers.1", NARROW)) if layers == 2 else set()
    for name in ("vllm", "speculators"):
        export_drafter(folder, name, tmp_path / name, target)
        names = set(shapes(tmp_path / name)) - {"embed_tokens.weight"}
        assert set(vllm_eagle3(names).values()) == wanted


@pytest.mark.parametrize("layers", [1, 2])
def test_sglangs_loader_drops_only_the_mask(layers: int, target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "eagle", **REDUCED, layers=layers)
    export_drafter(folder, "sglang", tmp_path / "out")
    parameters = {"model.fc.weight", "model.norm.weight", "lm_head.weight"}
    parameters |= set(under("model.midlayer", WIDE))
    if layers == 2:
        parameters |= set(under("model.additional_layers.0", NARROW))
    names = set(shapes(tmp_path / "out"))
    renamed = sglang_eagle3(names, parameters)
    assert names - set(renamed) == {"t2d"}
    assert set(renamed.values()) == parameters | {"hot_token_id"}


FULL = {**TOP, "lm_head.weight": [64, 16]}
KEPT = tuple(x for x in range(32) if x % 4 in (1, 2))
QK = {"self_attn.q_norm.weight": [4], "self_attn.k_norm.weight": [4]}
PUBLIC = {
    # SafeAILab: no list of layers, tables, an embedding or none
    "safeai": (
        {**LLAMA, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": 16},
        {**TOP, **under("midlayer", WIDE)},
        True,
    ),
    # SpecForge for SGLang: the nested list counts outputs
    "specforge": (
        {
            **LLAMA,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 16,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
            "norm_output": False,
        },
        {**TOP, **under("midlayer", WIDE)},
        True,
    ),
    "modelopt": (
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 16},
        {**TOP, **under("layers.0", WIDE)},
        False,
    ),
    "automodel": (
        {**LLAMA, "architectures": ["LlamaEagle3DraftModel"], "draft_vocab_size": 16},
        {
            "lm_head.weight": [16, 16],
            "model.fc.weight": [16, 48],
            "model.norm.weight": [16],
            **under("model.layers.0", WIDE),
        },
        True,
    ),
    "deepspec": (
        {
            **LLAMA,
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3",
            "target_layer_ids": [1, 2, 3, 4, 5],
        },
        {**FULL, "fc.weight": [16, 80], **under("layers.0", {**WIDE, **QK})},
        False,
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_files_of_others_are_read_without_a_leftover(
    name: str, target: Target, tmp_path: Path
) -> None:
    config, keys, mask = PUBLIC[name]
    tables = ids_of(*KEPT) if keys["lm_head.weight"] == [16, 16] else {}
    if not mask:
        tables.pop("t2d", None)
    folder = write(tmp_path / "theirs", config, keys, **tables)
    assert import_drafter(folder, tmp_path / "ours", target) == ()
    loaded, tensors = state(tmp_path / "ours", target), load_file(folder / "model.safetensors")
    assert sum(t.numel() for t in loaded.values()) == sum(
        t.numel() for key, t in tensors.items() if key != "t2d"
    )
    options = config_of(tmp_path / "ours")["options"]
    assert options["taps"] == ([1, 2, 3, 4, 5] if name == "deepspec" else [1, 3, 4])
    if tables:
        assert loaded["vocabulary.ids"].tolist() == list(KEPT)
    recognised = config_of(tmp_path / "ours")["training"]["imported"]["format"]
    assert recognised == ("safeai" if name == "specforge" else name)


def test_a_difference_to_defaults_is_rehydrated(target: Target, tmp_path: Path) -> None:
    """speculators omits what its config class has as a default: here head_dim 128."""
    folder = saved(target, tmp_path / "d", "eagle", **REDUCED)
    export_drafter(folder, "speculators", tmp_path / "out", target)
    inner = config_of(tmp_path / "out")["transformer_layer_config"]
    del inner["head_dim"], inner["model_type"]
    change(tmp_path / "out", transformer_layer_config=inner)
    with pytest.raises(UserError, match=r"o_proj.weight is .*, its config asks for \[16, 512\]"):
        import_drafter(tmp_path / "out", tmp_path / "back", target)


REAL = TargetShape(4096, 14336, 32, 32, 8, 128, 128256, 131072, 1e-5, {"rope_theta": 5e5})
LLAMA_31_8B = {  # EAGLE3-LLaMA3.1-Instruct-8B
    "fc.weight": (4096, 12288),
    "norm.weight": (4096,),
    "lm_head.weight": (32000, 4096),
    "midlayer.input_layernorm.weight": (4096,),
    "midlayer.hidden_norm.weight": (4096,),
    "midlayer.post_attention_layernorm.weight": (4096,),
    "midlayer.self_attn.q_proj.weight": (4096, 8192),
    "midlayer.self_attn.k_proj.weight": (1024, 8192),
    "midlayer.self_attn.v_proj.weight": (1024, 8192),
    "midlayer.self_attn.o_proj.weight": (4096, 4096),
    "midlayer.mlp.gate_proj.weight": (14336, 4096),
    "midlayer.mlp.up_proj.weight": (14336, 4096),
    "midlayer.mlp.down_proj.weight": (4096, 14336),
}


def test_sizes_of_a_real_drafter_are_known_before_anything_is_allocated() -> None:
    options = {
        "taps": [1, 15, 28],
        "layers": 1,
        "draft_vocab_size": 32000,
        "tap_norm": False,
        "qk_norm": False,
        "attention_bias": False,
    }
    keys = table(options, REAL, Names(first="midlayer"))
    assert expected("eagle", options, REAL, keys) == LLAMA_31_8B


def test_default_layers_are_the_ones_that_readers_fall_back_to() -> None:
    for count in (8, 28, 36):
        low, middle, high = usual_taps(count)
        assert (low + 1, middle + 1, high + 1) == (2, count // 2, count - 3)
        assert usual_taps(count) == replace(REAL, num_layers=count).default_taps

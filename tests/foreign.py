"""Foreign drafters for tests: files by literal key lists, and how engines' loaders rename."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.base import NeuralDrafter
from drafters.checkpoint import load_drafter, save_drafter
from drafters.registry import build_drafter
from drafters.target import Target
from tests.tiny import tiny_target

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LAYER = {
    "self_attn.o_proj.weight": [16, 16],
    "post_attention_layernorm.weight": [16],
    "mlp.gate_proj.weight": [32, 16],
    "mlp.up_proj.weight": [32, 16],
    "mlp.down_proj.weight": [16, 32],
    "input_layernorm.weight": [16],
}
WIDE = {
    **LAYER,
    "hidden_norm.weight": [16],
    "self_attn.q_proj.weight": [16, 32],
    "self_attn.k_proj.weight": [8, 32],
    "self_attn.v_proj.weight": [8, 32],
}
NARROW = {
    **LAYER,
    "self_attn.q_proj.weight": [16, 16],
    "self_attn.k_proj.weight": [8, 16],
    "self_attn.v_proj.weight": [8, 16],
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
}


def small_target(**changes: object) -> Target:
    """Make the target of these sizes."""
    return tiny_target(**{**SIZES, **changes})


def under(prefix: str, keys: Mapping[str, list[int]]) -> dict[str, list[int]]:
    return {f"{prefix}.{name}": shape for name, shape in keys.items()}


def make(target: Target, family: str, **options: object) -> NeuralDrafter:
    """Build a drafter away from every special starting point, with scattered draft ids."""
    torch.manual_seed(3)
    drafter = build_drafter(family, options, target.shape)
    assert isinstance(drafter, NeuralDrafter)
    if drafter.ids is not None:
        drafter.ids.copy_(torch.randperm(64)[: len(drafter.ids)].sort().values)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return drafter.eval()


def saved(target: Target, place: Path, family: str, **options: object) -> Path:
    """Save such a drafter."""
    return save_drafter(make(target, family, **options), place, target, dtype=torch.bfloat16)


def state(folder: Path, target: Target) -> dict[str, Tensor]:
    """Return what load_drafter makes of a folder."""
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, NeuralDrafter)
    return drafter.state_dict()


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def shapes(folder: Path, file: str = "model.safetensors") -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in load_file(folder / file).items()}


def ids_of(*kept: int) -> dict[str, Tensor]:
    """Return d2t and t2d of these ids, by their definition."""
    mask = torch.zeros(64, dtype=torch.bool)
    mask[list(kept)] = True
    return {"d2t": torch.tensor([x - i for i, x in enumerate(kept)]), "t2d": mask}


def write(
    place: Path,
    config: Mapping[str, Any],
    keys: Mapping[str, list[int]],
    file: str = "model.safetensors",
    **tensors: Tensor,
) -> Path:
    """Write a foreign folder with random weights of these shapes."""
    place.mkdir(parents=True)
    weights = {name: torch.randn(shape) for name, shape in keys.items()}
    (place / "config.json").write_text(json.dumps(config))
    save_file({**weights, **tensors}, place / file)
    return place


def change(folder: Path, **changes: Any) -> Path:
    """Change keys of a config; None leaves one out."""
    config = {**config_of(folder), **changes}
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def retensor(folder: Path, **changes: Tensor | None) -> Path:
    """Change tensors of a file, "__" standing for "."; None leaves one out."""
    file = folder / "model.safetensors"
    tensors: dict[str, Tensor | None] = dict(load_file(file))
    tensors.update({name.replace("__", "."): tensor for name, tensor in changes.items()})
    save_file({name: t for name, t in tensors.items() if t is not None}, file)
    return folder


def vllm_eagle3(names: Iterable[str]) -> dict[str, str]:
    """Return {name: engine parameter} as vLLM's EAGLE-3 loader renames them; t2d is skipped."""
    renamed = {}
    for name in names:
        if name == "t2d":
            continue
        engine = name.replace("midlayer.", "layers.0.")
        if name == "d2t":
            engine = "draft_id_to_target_id"
        elif "lm_head" not in name and not engine.startswith("model."):
            engine = f"model.{engine}"
        renamed[name] = engine
    return renamed


def sglang_eagle3(names: Iterable[str], parameters: set[str]) -> dict[str, str]:
    """Return {name: engine parameter}: the name, then model.NAME, else it is dropped."""
    renamed = {}
    for name in names:
        if name == "d2t":
            renamed[name] = "hot_token_id"
        for engine in (name, f"model.{name}"):
            if engine in parameters:
                renamed[name] = engine
                break
    return renamed


def vllm_medusa(names: Iterable[str], parameters: set[str]) -> dict[str, str]:
    """Return {name: engine parameter}; what matches nothing is ignored without a word."""
    stripped = {name: name.removeprefix("medusa_heads.") for name in names}
    return {name: engine for name, engine in stripped.items() if engine in parameters}

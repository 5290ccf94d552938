"""EAGLE-1 in flat configs: EAGLE's own code, vLLM and SGLang.

EAGLE-2's files are the same. Embedding and head are the target's and are not written. Readers
disagree on the bias of `fc`: EAGLE's own code and SGLang take it as there unless `bias` says false,
vLLM has none. Source: EAGLE's code and vLLM's llama_eagle.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from drafters.errors import UserError
from drafters.formats.dialect import Dialect, Ours, Theirs, refuse
from drafters.formats.eagle3 import EMBEDDING
from drafters.formats.foreign import Foreign
from drafters.formats.keys import Key, take, to_theirs
from drafters.formats.layer_keys import layer_keys
from drafters.formats.llama_config import flag, read_sizes, write_sizes
from drafters.layers import LayerKind
from drafters.shape import TargetShape
from drafters.target import Target

FAMILY = "eagle1"
OPTIONS = frozenset(
    {
        "unroll",
        "noise",
        "draft_vocab_size",
        "qk_norm",
        "attention_bias",
        "fusion_bias",
        "init_fusion",
    }
)
_BIAS, _OUR_BIAS, _LAYER = "fc.bias", "fusion.bias", "layers.0"


def _table(shape: TargetShape, options: Mapping[str, Any]) -> list[Key]:
    kind = LayerKind(bias=options["attention_bias"], input_norm=False)
    bias = [Key(_OUR_BIAS, (_BIAS,))] if options["fusion_bias"] else []
    layer = layer_keys("layer", _LAYER, shape, kind)
    return [Key("fusion.weight", ("fc.weight",)), *bias, *layer]


def _write(name: str, ours: Ours, target: Target | None) -> Theirs:
    options, shape = ours.options, ours.shape
    biased = options["fusion_bias"] and bool(ours.tensors[_OUR_BIAS].any())
    refuse(
        FAMILY,
        name,
        {"qk_norm": options["qk_norm"], "attention_bias": options["attention_bias"]},
    )
    dtype = str(ours.dtype).removeprefix("torch.")
    written = name != "vllm" and (biased or name == "sglang")  # sglang makes up a missing one
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **write_sizes(shape),
        "vocab_size": shape.vocab_size,
        "bias": written,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    tensors = to_theirs(ours.tensors, _table(shape, options))
    if not written:
        tensors.pop(_BIAS, None)
    elif not options["fusion_bias"]:
        tensors[_BIAS] = torch.zeros(shape.hidden_size, dtype=ours.dtype)
    lost = ["the bias of fc (its code has none)"] if biased and not written else []
    if ours.ids is not None:
        lost.append(
            f"draft_vocab_size = {len(ours.ids)} (its code drafts all {shape.vocab_size} ids)"
        )
    return Theirs(config, tensors, tuple(lost))


def _claims(foreign: Foreign) -> bool:
    layer = foreign.has("fc.weight", f"{_LAYER}.self_attn.q_proj.weight")
    inner = (f"{_LAYER}.input_layernorm.weight", f"{_LAYER}.hidden_norm.weight")
    return layer and not any(name in foreign.headers for name in inner)


def _read(foreign: Foreign, target: Target) -> Ours:
    config, folder = foreign.config, foreign.folder
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is not int:
        raise UserError(f"{folder}: vocab_size is {vocab_size!r}: give the target's")
    shape = read_sizes(config, folder, target.shape.num_layers, vocab_size)
    for what in ("hidden_size", "vocab_size"):
        found, wanted = getattr(shape, what), getattr(target.shape, what)
        if found != wanted:
            raise UserError(f"{folder}: its {what} is {found}, {target.name} has {wanted}")
    if config.get("num_hidden_layers", 1) != 1:
        raise UserError(f"{folder}: num_hidden_layers is not 1: one layer drafts here")
    biased = foreign.has(_BIAS)
    if flag(config, "bias", folder, absent=True) and not biased:
        raise UserError(
            f"{folder}: config.json asks for {_BIAS} (bias absent means true) and the file has "
            'none: write "bias": false if it was trained without'
        )
    options: dict[str, Any] = {
        "draft_vocab_size": 0,
        "qk_norm": False,
        "attention_bias": flag(config, "attention_bias", folder),
        "fusion_bias": biased,
    }
    tensors = take(foreign, FAMILY, options, shape, _table(shape, options), (EMBEDDING,))
    return Ours(FAMILY, options, shape, tensors)


DIALECTS = (
    Dialect("safeai", FAMILY, OPTIONS, partial(_write, "safeai"), _read, _claims),
    Dialect("vllm", FAMILY, OPTIONS, partial(_write, "vllm")),
    Dialect("sglang", FAMILY, OPTIONS, partial(_write, "sglang")),
)

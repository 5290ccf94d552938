"""A standalone drafter as an ordinary causal LM: what vLLM, SGLang and transformers take.

Such folders need no import: they draft as they are.
"""

from typing import Any

import torch
from torch import Tensor

from drafters.errors import UserError
from drafters.formats.dialect import Dialect, Ours, Theirs, needed, refuse
from drafters.formats.keys import Key, to_theirs
from drafters.formats.layer_keys import layer_keys
from drafters.formats.llama_config import write_sizes
from drafters.formats.medusa_heads import whole_head
from drafters.layers import LayerKind
from drafters.shape import TargetShape
from drafters.target import Target

FAMILY = "standalone"
_SOURCE = {"layers", "num_layers", "model", "model_shape"}
OPTIONS = frozenset({"draft_vocab_size", "qk_norm", "attention_bias"} | _SOURCE)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def write(ours: Ours, target: Target | None) -> Theirs:
    """Return the drafter's layers between the target's embedding and its own head."""
    options = ours.options
    target = needed(target, "embedding and tokenizer")
    both = options["qk_norm"] and options["attention_bias"]
    refuse(FAMILY, "transformers", {"qk_norm together with attention_bias": both})
    kind = "qwen3" if options["qk_norm"] else "qwen2" if options["attention_bias"] else "llama"
    shape = TargetShape(**options["model_shape"]) if options["model_shape"] else ours.shape
    tensors = to_theirs(ours.tensors, _table(ours, shape))
    if ours.ids is not None and options["model"]:
        raise UserError(
            "the head of this drafter lacks rows that only the model it started from has: train "
            "one with draft_vocab_size=0 to export it as a causal LM"
        )
    tensors[HEAD] = whole_head(ours, target, tensors[HEAD])
    if EMBEDDING not in tensors:
        every = torch.arange(shape.vocab_size, device=target.device)
        tensors[EMBEDDING] = target.embed(every).to("cpu", copy=True)
    # one dtype a model: the widest, so that nothing is rounded
    dtype = torch.promote_types(ours.dtype, tensors[EMBEDDING].dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    config = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "num_hidden_layers": len(options["layers"]),
        "vocab_size": ours.shape.vocab_size,
        **write_sizes(shape),
        "attention_bias": options["attention_bias"],
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        **_special_ids(target),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "dtype": str(dtype).removeprefix("torch."),
    }
    return Theirs(config, tensors, _lost(ours), tokenizer=target.tokenizer)


def _table(ours: Ours, shape: TargetShape) -> list[Key]:
    kind = LayerKind(qk_norm=ours.options["qk_norm"], bias=ours.options["attention_bias"])
    keys = [Key("norm.weight", ("model.norm.weight",)), Key("head.weight", (HEAD,))]
    if ours.options["model"]:
        keys.append(Key("embedding.weight", (EMBEDDING,)))
    for i in range(len(ours.options["layers"])):
        keys += layer_keys(f"layers.{i}", f"model.layers.{i}", shape, kind)
    return keys


def _special_ids(target: Target) -> dict[str, Any]:
    values: dict[str, Tensor | int | None] = target.config.to_dict()
    return {name: values.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _lost(ours: Ours) -> tuple[str, ...]:
    if ours.ids is None:
        return ()
    return (
        f"draft_vocab_size = {len(ours.ids)} (a causal LM's head has all {ours.shape.vocab_size} "
        "ids: the rows of the others are the target's own, untrained)",
    )


NAMES = ("transformers", "vllm", "sglang")
DIALECTS = tuple(Dialect(name, FAMILY, OPTIONS, write) for name in NAMES)

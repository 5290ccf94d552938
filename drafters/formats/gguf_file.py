"""A standalone drafter as one GGUF file, for llama.cpp's draft model.

llama.cpp splits text by rules that it knows by name, so a tokenizer is written only if its own
rule is in the table below: a wrong name would split text wrongly without an error.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from drafters.errors import UserError
from drafters.formats import causal_lm
from drafters.formats.dialect import Dialect, Ours, Theirs
from drafters.target import Target

NAME, FILE = "gguf", "model.gguf"
TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {  # llama.cpp's name of the rule that each chain of Hugging Face's is
    (("ByteLevel", "own"),): "gpt-2",
    (("Digits", "single"), ("ByteLevel", "own")): "smollm",
    (("Split", rf"{_WORDS}\p{{N}}{{1,3}}{_REST}"), ("ByteLevel", "none")): "llama-bpe",
    (("Split", rf"{_WORDS}\p{{N}}{_REST}"), ("ByteLevel", "none")): "qwen2",
}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # types of tokens


def _write(ours: Ours, target: Target | None) -> Theirs:
    theirs = causal_lm.write(ours, target)
    kind = theirs.config["rope_parameters"].get("rope_type", "default")
    if kind not in ("default", "linear"):
        raise UserError(f"rope type {kind!r} is not written as GGUF here: default and linear are")
    assert target is not None
    if target.tokenizer is None:
        raise UserError("a GGUF file holds the tokenizer, and this target has none")
    _split(json.loads(target.tokenizer.backend_tokenizer.to_str()))  # before anything is written
    return Theirs(theirs.config, theirs.tensors, theirs.lost, FILE, theirs.tokenizer, save=_save)


def gguf_name(name: str) -> str:
    """Return the GGUF's name of a causal LM's tensor.

    >>> gguf_name("model.layers.3.mlp.up_proj.weight")
    'blk.3.ffn_up.weight'
    """
    stem, _, what = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{TENSORS[stem]}.{what}"
    index, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{LAYER[part]}.{what}"


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return a projection's rows [heads * hd, ...] in the order of llama.cpp's rotary pairs.

    Hugging Face turns row i with row i + hd / 2, llama.cpp's Llama rows 2 i and 2 i + 1.
    """
    halves = weight.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).reshape(weight.shape)


def _save(theirs: Theirs, folder: Path) -> None:
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            "the package 'gguf' is needed to write GGUF; install 'specdrafters[demo]'"
        ) from error
    config = theirs.config
    kind = config["model_type"]
    writer = gguf.GGUFWriter(folder / theirs.weights, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config["rope_scaling"] is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, theirs.tokenizer, config["vocab_size"])
    wide = gguf.GGMLQuantizationType[_width(config["dtype"])]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in theirs.tensors.items():
        turned = heads.get(name.split(".")[-2]) if kind == "llama" else None
        values: np.ndarray = (interleaved(tensor, turned) if turned else tensor).float().numpy()
        if tensor.ndim == 1:  # norms and biases are float32 in every GGUF
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, wide), raw_dtype=wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _width(dtype: str) -> str:
    return {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]


def _add_tokenizer(writer: Any, tokenizer: Any, vocab_size: int) -> None:
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {entry["id"]: entry["special"] for entry in core["added_tokens"]}
    strings = {i: token for token, i in tokenizer.get_vocab().items()}
    tokens = [strings.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    types = [
        _UNUSED
        if i not in strings
        else _NORMAL
        if i not in added
        else _CONTROL
        if added[i]
        else _USER_DEFINED
        for i in range(vocab_size)
    ]
    merges = core["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split(core))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([x if isinstance(x, str) else " ".join(x) for x in merges])
    for kind in ("bos", "eos", "pad", "unk"):
        token = getattr(tokenizer, f"{kind}_token_id")
        if token is not None:
            getattr(writer, f"add_{kind}_token_id")(token)
    first = tokenizer("a")["input_ids"][:1]
    writer.add_add_bos_token(bool(first) and first[0] == tokenizer.bos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _split(core: dict[str, Any]) -> str:
    """Return llama.cpp's name of a tokenizer's splitting.

    Raises:
        UserError: if it has none that is known here.
    """
    pre: dict[str, Any] = core["pre_tokenizer"] or {"type": "none"}
    chain: list[dict[str, Any]] = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    found = tuple((step["type"], _detail(step)) for step in chain)
    if core["model"]["type"] != "BPE" or found not in SPLITS:
        raise UserError(
            f"how this tokenizer splits text ({core['model']['type']}: {found}) has no name of "
            f"llama.cpp's that is known here; known are {', '.join(SPLITS.values())}"
        )
    return SPLITS[found]


def _detail(step: dict[str, Any]) -> str:
    if step["type"] == "ByteLevel":
        return "own" if step.get("use_regex", True) else "none"
    if step["type"] == "Digits":
        return "single" if step["individual_digits"] else "runs"
    if step["type"] == "Split":
        return str(step["pattern"].get("Regex", step["pattern"]))
    return ""


DIALECT = Dialect(NAME, causal_lm.FAMILY, causal_lm.OPTIONS, _write)

"""From the embedded target's GGUF to a plain Hugging Face folder.

transformers dequantises the weights. The rest it does not keep, so it is written out here: a config
without a trace of the GGUF, and SmolLM2's tokenizer, whose splitting into single digits the
GGUF names ("smollm") but transformers' conversion (5.24) drops: two blanks before a digit are one
token for the model and would become two.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from drafters.errors import UserError

BOS, EOS, UNK = 1, 2, 0  # the padding token is EOS
CONTEXT = 8192
CONTROL = 3  # GGUF's type of a token that text never yields


def versions() -> dict[str, str]:
    """Return the versions of what had a hand in the conversion."""
    return {
        name: metadata.version(name) for name in ("gguf", "tokenizers", "torch", "transformers")
    }


def convert(gguf: Path, into: Path) -> None:
    """Write `model.safetensors` (float32), the configs and the tokenizer, and read them back.

    Args:
        gguf: the quantised model.
        into: an empty folder.

    Raises:
        UserError: the package `gguf` is missing.
        RuntimeError: what was written is not what was read.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(
            "the package 'gguf' is needed to read the embedded target; install 'specdrafters[demo]'"
        ) from error
    fields = GGUFReader(gguf).fields
    tokenizer = build_tokenizer(
        tokens=fields["tokenizer.ggml.tokens"].contents(),
        merges=fields["tokenizer.ggml.merges"].contents(),
        kinds=fields["tokenizer.ggml.token_type"].contents(),
        chat_template=fields["tokenizer.chat_template"].contents(),
    )
    tokenizer.save_pretrained(into)
    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    model = LlamaForCausalLM(clean_config(source.config))
    model.load_state_dict(source.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS)
    model.save_pretrained(into, max_shard_size="2GB")
    (into / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    check(into, source.state_dict())


def build_tokenizer(
    tokens: Sequence[str], merges: Sequence[str], kinds: Sequence[int], chat_template: str
) -> PreTrainedTokenizerFast:
    """Build SmolLM2's byte-level BPE: digits one by one, no prefix space, nothing added.

    Args:
        tokens: the vocabulary in the order of its ids, in byte-level letters.
        merges: pairs "left right", the first one first.
        kinds: GGUF's token types, beside `tokens`.
        chat_template: Jinja source.
    """
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    core.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[BOS],
        eos_token=tokens[EOS],
        pad_token=tokens[EOS],
        unk_token=tokens[UNK],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


def clean_config(source: Any) -> LlamaConfig:
    """Return the config that the original model has, with the sizes of the GGUF's."""
    return LlamaConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=source.head_dim,
        max_position_embeddings=source.max_position_embeddings,
        initializer_range=1 / 24,
        # The GGUF holds the float32 nearest to it.
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        dtype=torch.float32,
    )


def check(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Load a written folder and compare it with what it was made from.

    Args:
        folder: config, weights and tokenizer.
        expected: the source's state dict.

    Raises:
        RuntimeError: names the first difference.
    """
    model = LlamaForCausalLM.from_pretrained(folder)
    loaded = model.state_dict()
    for name, tensor in expected.items():
        if not torch.equal(loaded[name], tensor):
            raise RuntimeError(f"{folder}: tensor {name} changed on its way through the file")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    opening = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    facts = {
        "opening of an answer": (opening["input_ids"][0, -4:].tolist(), [1, 520, 9531, 198]),
        "two blanks and a digit": (len(tokenizer("x  1")["input_ids"]), 3),
        "tokens": (len(tokenizer), model.config.vocab_size),
        "dtype": (model.dtype, torch.float32),
        "tied": (model.lm_head.weight is model.model.embed_tokens.weight, True),
    }
    for name, (found, wanted) in facts.items():
        if found != wanted:
            raise RuntimeError(f"{folder}: {name}: {found} instead of {wanted}")
    # transformers' own annotations do not let its models generate (5.24).
    answer = cast("Any", model).generate(**opening, max_new_tokens=8, do_sample=False)
    text = tokenizer.decode(answer[0, opening["input_ids"].shape[1] :])
    if "Paris" not in text:
        raise RuntimeError(f"{folder}: the capital of France is {text!r}")

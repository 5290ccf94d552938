"""EAGLE-3 as the speculators library writes it: nested config, the target's embedding inside."""

from collections.abc import Iterable

import torch

from drafters.formats.dialect import Dialect, Ours, Theirs, needed, refuse
from drafters.formats.eagle3 import (
    EMBEDDING,
    FAMILY,
    OPTIONS,
    Names,
    flags,
    layer_list,
    read,
    table,
)
from drafters.formats.foreign import Foreign
from drafters.formats.id_tables import id_tables
from drafters.formats.keys import to_theirs
from drafters.formats.llama_config import read_sizes, write_sizes
from drafters.formats.proposals import proposed, proposing
from drafters.target import Target

NAME, KIND = "speculators", "eagle3"
_IDS = "eagle_aux_hidden_state_layer_ids"
_NAMES = Names()


def write(ours: Ours, target: Target | None) -> Theirs:
    """Return an eagle as the library holds it."""
    options, shape = ours.options, ours.shape
    target = needed(target, "the embedding")
    refuse(FAMILY, NAME, {"attention_bias": options["attention_bias"]})
    ids = ours.ids
    dtype = str(ours.dtype).removeprefix("torch.")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": KIND,
        "speculators_version": "0.6.0",
        "draft_vocab_size": shape.vocab_size if ids is None else len(ids),
        "norm_before_residual": options["norm_before_residual"],
        "norm_before_fc": False,
        "fc_norm": options["tap_norm"],
        "norm_output": options["norm_output"],
        "embed_requires_grad": False,
        "target_hidden_size": None,
        _IDS: [k + 1 for k in options["taps"]],
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
        "speculators_config": proposing(KIND, options["unroll"], target),
        "transformer_layer_config": {
            "model_type": "qwen3" if options["qk_norm"] else "llama",
            "num_hidden_layers": options["layers"],
            "vocab_size": shape.vocab_size,
            **write_sizes(shape),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
    }
    tensors = to_theirs(ours.tensors, table(options, shape, _NAMES))
    every = torch.arange(shape.vocab_size, device=target.device)
    tensors[EMBEDDING] = target.embed(every).to("cpu", ours.dtype, copy=True)
    if ids is not None:
        tensors |= id_tables(ids, shape.vocab_size)
    return Theirs(config, tensors)


def _claims(foreign: Foreign) -> bool:
    return foreign.config.get("speculators_model_type") == KIND


def read_nested(
    foreign: Foreign,
    target: Target,
    residual_absent: bool | None = None,
    besides: Iterable[str] = (),
) -> Ours:
    """Read a folder as an eagle.

    Args:
        foreign: the folder.
        target: that the drafter is for.
        residual_absent: what the absence of norm_before_residual means; None: it must be there
            (it is false for the library and true for vLLM).
        besides: tensors that are read in another way.

    Raises:
        UserError: if it is not an eagle for this target.
    """
    config, folder = foreign.config, foreign.folder
    inner = foreign.section("transformer_layer_config")
    vocab_size = inner.get("vocab_size", target.shape.vocab_size)  # omitted where it is a default
    # the library's own default class, where nothing is said
    sizes = {"model_type": "qwen3", **inner}
    shape = read_sizes(sizes, folder, target.shape.num_layers, vocab_size)
    options = {
        "layers": inner.get("num_hidden_layers", 1),
        **flags(config, folder, residual_absent),
        "unroll": proposed(foreign),
    }
    taps = layer_list(foreign, _IDS, config.get(_IDS), 1)
    return read(foreign, target, _NAMES, shape, taps, options, besides)


DIALECT = Dialect(NAME, FAMILY, OPTIONS, write, read_nested, _claims)

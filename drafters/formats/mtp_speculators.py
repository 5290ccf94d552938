"""MTP as the speculators library writes it: one module for all depths, Qwen3's layers.

Embedding and head are the target's and not stored; the normed state is fed on. The library puts the
module back into a target that ships one (its native names are those of mtp.py); no engine reads
this file as it is. Source: speculators' mtp.
"""

from drafters.errors import UserError
from drafters.formats.dialect import Dialect, Ours, Theirs, needed, refuse
from drafters.formats.eagle3 import EMBEDDING, HEAD
from drafters.formats.foreign import Foreign
from drafters.formats.keys import Key, take, to_theirs
from drafters.formats.layer_keys import layer_keys
from drafters.formats.llama_config import flag, read_sizes, write_sizes
from drafters.formats.proposals import proposed, proposing
from drafters.layers import LayerKind
from drafters.shape import TargetShape
from drafters.target import Target

NAME, FAMILY = "speculators", "mtp"
OPTIONS = frozenset(
    {"modules", "unroll", "draft_vocab_size", "norm_output", "init", "qk_norm", "attention_bias"}
)
_LAYER = "mtp_layers.0"
_AROUND = {
    "embedding_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "project": "input_proj",
    "norm": "final_layernorm",
}


def _table(shape: TargetShape) -> list[Key]:
    around = [
        Key(f"steps.0.{ours}.weight", (f"{_LAYER}.{theirs}.weight",))
        for ours, theirs in _AROUND.items()
    ]
    return [*around, *layer_keys("steps.0.layer", _LAYER, shape, LayerKind(qk_norm=True))]


def _write(ours: Ours, target: Target | None) -> Theirs:
    options, shape = ours.options, ours.shape
    target = needed(target, "the kind")
    reasons = {
        f"modules = {options['modules']} (it has one for all depths)": options["modules"] != 1,
        "states fed on without the norm (train with norm_output=true)": not options["norm_output"],
        "queries and keys without norms (train with qk_norm=true)": not options["qk_norm"],
        "attention_bias": options["attention_bias"],
    }
    refuse(FAMILY, NAME, reasons)
    dtype = str(ours.dtype).removeprefix("torch.")
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.9.0",
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
        "speculators_config": proposing(FAMILY, options["unroll"], target),
        "transformer_layer_config": {
            "model_type": "qwen3",
            "num_hidden_layers": shape.num_layers,
            "vocab_size": shape.vocab_size,
            **write_sizes(shape),
            "attention_bias": False,
            "tie_word_embeddings": False,
        },
    }
    lost = ()
    if ours.ids is not None:
        lost = (f"draft_vocab_size = {len(ours.ids)} (its code drafts all {shape.vocab_size} ids)",)
    return Theirs(config, to_theirs(ours.tensors, _table(shape)), lost)


def _claims(foreign: Foreign) -> bool:
    return foreign.config.get("speculators_model_type") == "mtp"


def _read(foreign: Foreign, target: Target) -> Ours:
    folder, inner = foreign.folder, foreign.section("transformer_layer_config")
    if foreign.config.get("num_nextn_predict_layers", 1) != 1:
        raise UserError(f"{folder}: num_nextn_predict_layers is not 1, which is all that is known")
    if inner.get("model_type") != "qwen3":
        raise UserError(
            f"{folder}: its layers are {inner.get('model_type')!r}: those of qwen3 have a place "
            "here (grouped attention, SwiGLU, normed queries and keys)"
        )
    shape = read_sizes(inner, folder, target.shape.num_layers, target.shape.vocab_size)
    for what, found in (
        ("hidden_size", shape.hidden_size),
        ("vocab_size", inner.get("vocab_size", target.shape.vocab_size)),
    ):
        if found != getattr(target.shape, what):
            raise UserError(
                f"{folder}: its {what} is {found}, {target.name} has "
                f"{getattr(target.shape, what)}: give the target that it was made for"
            )
    if flag(inner, "attention_bias", folder):
        raise UserError(f"{folder}: attention_bias is true: qwen3's layers have none")
    options = {
        "modules": 1,
        "unroll": proposed(foreign),
        "draft_vocab_size": 0,
        "norm_output": True,
        "qk_norm": True,
        "attention_bias": False,
    }
    tensors = take(foreign, FAMILY, options, shape, _table(shape), (EMBEDDING, HEAD))
    return Ours(FAMILY, options, shape, tensors)


DIALECT = Dialect(NAME, FAMILY, OPTIONS, _write, _read, _claims)

"""DFlash and DSpark: block drafters as their authors' flat files and the speculators library's.

Their readers know layers with normed queries and keys only (Qwen3's), and stand for an unknown
token by the embedding of one id. Ours learns a vector instead: it is written as that id's row of
an embedding of the file's own, which is otherwise the target's.
Sources: DFlash (arXiv 2602.06036), DSpark (DeepSeek, June 2026), and vLLM's qwen3_dflash and
qwen3_dspark.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from drafters.errors import UserError
from drafters.formats.dialect import Dialect, Ours, Theirs, needed, refuse
from drafters.formats.eagle3 import EMBEDDING, HEAD, layer_list
from drafters.formats.foreign import Foreign
from drafters.formats.id_tables import D2T, T2D, id_tables, read_ids
from drafters.formats.keys import IDS, Key, take, to_theirs
from drafters.formats.layer_keys import layer_keys
from drafters.formats.llama_config import flag, read_sizes, write_sizes
from drafters.formats.markov import APART, MARKOV, ROWS, markov_keys, read_markov, write_markov
from drafters.formats.proposals import proposing
from drafters.formats.stand_in import embedding_with, read_stand_in, stand_in
from drafters.layers import LayerKind
from drafters.shape import TargetShape
from drafters.target import Target

_MASK, _OUR_HEAD = "mask", "head.weight"


@dataclass(frozen=True)
class Family:
    """What tells the families apart in their files.

    Args:
        name: ours.
        flat: architecture of the authors' files.
        nested: architecture of the speculators library's; its kind is our name.
        lead: slots before the first that guesses.
        options: beyond those of all.
    """

    name: str
    flat: str
    nested: str
    lead: int
    options: frozenset[str] = frozenset()

    @property
    def known(self) -> frozenset[str]:
        """Return the options that their files have a place for, or that only training reads."""
        shared = {"taps", "layers", "slots", "draft_vocab_size", "qk_norm", "attention_bias"}
        return frozenset(shared | {"anchors", "init"} | self.options)


DFLASH = Family("dflash", "DFlashDraftModel", "DFlashSpeculator", lead=1)
DSPARK = Family("dspark", "Qwen3DSparkModel", "DSparkSpeculator", lead=0, options=MARKOV)


def _table(
    family: Family, options: Mapping[str, Any], shape: TargetShape, *, head: bool = True
) -> list[Key]:
    keys = [
        Key("fusion.weight", ("fc.weight",)),
        Key("context_norm.weight", ("hidden_norm.weight",)),
        Key("norm.weight", ("norm.weight",)),
    ]
    if head:
        keys.append(Key(_OUR_HEAD, (HEAD,)))
    kind = LayerKind(qk_norm=options["qk_norm"], bias=options["attention_bias"])
    for i in range(options["layers"]):
        keys += layer_keys(f"layers.{i}", f"layers.{i}", shape, kind)
    return [*keys, *markov_keys(options)] if family is DSPARK else keys


def _write(family: Family, nested: bool, ours: Ours, target: Target | None) -> Theirs:
    options, shape, ids = ours.options, ours.shape, ours.ids
    refuse(
        family.name,
        "speculators" if nested else "flat",
        {
            "queries and keys without norms (train with qk_norm=true)": not options["qk_norm"],
            "attention_bias": options["attention_bias"],
        },
    )
    target = needed(target, "the embedding")
    place = stand_in(ids, shape.vocab_size)
    rest = {name: t for name, t in ours.tensors.items() if name not in {_MASK} | APART}
    sparks, lost = write_markov(ours) if family is DSPARK else ({}, ())
    tensors = to_theirs(rest, _table(family, options, shape)) | sparks
    tensors[EMBEDDING] = embedding_with(ours.tensors[_MASK], place, target, ours.dtype)
    if ids is not None:
        tensors |= id_tables(ids, shape.vocab_size)
    config = (_nested if nested else _flat)(family, ours, place, target)
    return Theirs(config, tensors, lost)


def _common(family: Family, ours: Ours, place: int) -> dict[str, Any]:
    options, ids = ours.options, ours.ids
    dtype = str(ours.dtype).removeprefix("torch.")
    config = {
        "block_size": family.lead + options["slots"],
        "mask_token_id": place,
        "draft_vocab_size": ours.shape.vocab_size if ids is None else len(ids),
        "sample_from_anchor": family is DSPARK,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if family is DSPARK:
        config |= {
            "markov_rank": options["markov_rank"],
            "markov_head_type": "vanilla",
            "enable_confidence_head": options["confidence"],
            "confidence_head_with_markov": options["confidence"] and options["markov_rank"] > 0,
        }
    return config


def _layers(ours: Ours) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "num_hidden_layers": ours.options["layers"],
        "vocab_size": ours.shape.vocab_size,
        **write_sizes(ours.shape),
        "attention_bias": False,
        "layer_types": ["full_attention"] * ours.options["layers"],
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }


def _flat(family: Family, ours: Ours, place: int, target: Target) -> dict[str, Any]:
    taps, common = list(ours.options["taps"]), _common(family, ours, place)
    inner = {name: common[name] for name in ("block_size", "mask_token_id")}
    return {
        "architectures": [family.flat],
        **_layers(ours),
        **common,
        "target_layer_ids": taps,
        "target_hidden_size": ours.shape.hidden_size,
        "num_target_layers": ours.shape.num_layers,
        "dflash_config": {**inner, "target_layer_ids": taps, "use_aux_hidden_state": True},
    }


def _nested(family: Family, ours: Ours, place: int, target: Target) -> dict[str, Any]:
    return {
        "architectures": [family.nested],
        "speculators_model_type": family.name,
        "speculators_version": "0.9.0",
        **_common(family, ours, place),
        "aux_hidden_state_layer_ids": [k + 1 for k in ours.options["taps"]],
        "target_hidden_size": None,
        "sliding_window_non_causal": False,
        "speculators_config": proposing(family.name, ours.options["slots"], target),
        "transformer_layer_config": _layers(ours),
    }


def _claims(family: Family, nested: bool, foreign: Foreign) -> bool:
    config = foreign.config
    if nested or "speculators_model_type" in config:
        return nested and config.get("speculators_model_type") == family.name
    sparks = any(name.startswith("markov_head.") for name in foreign.headers)
    block = foreign.has("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight")
    return block and sparks == (family is DSPARK) and "block_size" in _values(foreign)


def _values(foreign: Foreign) -> dict[str, Any]:
    """Return the config with what dflash_config says in place of the top level's."""
    return {**foreign.config, **foreign.section("dflash_config")}


def _read(family: Family, nested: bool, foreign: Foreign, target: Target) -> Ours:
    config, folder = _values(foreign), foreign.folder
    layers = foreign.section("transformer_layer_config") if nested else config
    shape = read_sizes(
        {"model_type": "qwen3", **layers}, folder, target.shape.num_layers, target.shape.vocab_size
    )
    if (shape.hidden_size, layers.get("vocab_size", shape.vocab_size)) != (
        target.shape.hidden_size,
        target.shape.vocab_size,
    ):
        raise UserError(
            f"{folder}: made for a target of hidden_size {shape.hidden_size} and vocab_size "
            f"{layers.get('vocab_size')}; {target.name} has {target.shape.hidden_size} and "
            f"{target.shape.vocab_size}"
        )
    head = foreign.has(HEAD)
    ids = read_ids(foreign, foreign.matrix(HEAD)[0], shape.vocab_size) if head else None
    options: dict[str, Any] = {
        "taps": _taps(foreign, config, target.shape.num_layers),
        "layers": _whole(foreign, layers, "num_hidden_layers", 1),
        "slots": _whole(foreign, config, "block_size", 1 + family.lead) - family.lead,
        "draft_vocab_size": 0 if ids is None else len(ids),
        "qk_norm": True,
        "attention_bias": flag(layers, "attention_bias", folder),
    }
    if family is DSPARK:
        options |= _spark_options(foreign, config)
    keys = _table(family, options, shape, head=head)
    tensors = take(foreign, family.name, options, shape, keys, (D2T, T2D, EMBEDDING, ROWS))
    if family is DSPARK:
        tensors |= read_markov(foreign, ids, shape.vocab_size, options)
    kept = torch.arange(shape.vocab_size) if ids is None else ids
    if not head:
        tensors[_OUR_HEAD] = target.head_rows(kept).to("cpu")
    tensors[_MASK], lost = read_stand_in(foreign, config.get("mask_token_id"), target)
    if ids is not None:
        tensors[IDS] = ids
    return Ours(family.name, options, shape, tensors, lost=lost)


def _spark_options(foreign: Foreign, config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config.get("markov_head_type", "vanilla")
    if kind != "vanilla":
        raise UserError(f"{foreign.folder}: markov_head_type is {kind!r}: only vanilla is known")
    return {
        "markov_rank": _whole(foreign, config, "markov_rank", 0),
        "confidence": foreign.has("confidence_head.proj.weight"),
    }


def _taps(foreign: Foreign, config: Mapping[str, Any], num_layers: int) -> list[int]:
    """Return the tapped layers in our numbering; a target's last state behind them is none.

    Raises:
        UserError: if there is no list.
    """
    for name, start in (("target_layer_ids", 0), ("aux_hidden_state_layer_ids", 1)):
        taps = layer_list(foreign, name, config.get(name), start)
        if taps is not None:
            return taps[:-1] if start and taps[-1] == num_layers - 1 else taps
    raise UserError(f"{foreign.folder}: no target_layer_ids: nothing says which layers are tapped")


def _whole(foreign: Foreign, config: Mapping[str, Any], name: str, least: int) -> int:
    value = config.get(name)
    if type(value) is not int or value < least:
        raise UserError(f"{foreign.folder}: {name} is {value!r}: give {least} or more")
    return value


def _dialect(name: str, family: Family, nested: bool, *, read: bool = True) -> Dialect:
    return Dialect(
        name,
        family.name,
        family.known,
        partial(_write, family, nested),
        partial(_read, family, nested) if read else None,
        partial(_claims, family, nested) if read else None,
    )


DIALECTS = (
    _dialect("zlab", DFLASH, nested=False),
    _dialect("vllm", DFLASH, nested=False, read=False),
    _dialect("deepspec", DSPARK, nested=False),
    _dialect("vllm", DSPARK, nested=False, read=False),
    _dialect("speculators", DFLASH, nested=True),
    _dialect("speculators", DSPARK, nested=True),
)

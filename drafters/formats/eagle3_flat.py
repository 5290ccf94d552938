"""EAGLE-3 in flat configs: EAGLE's own code, vLLM, SGLang, SpecForge, and other trainers' files.

One dialect in several hands: they differ in prefixes, in where the list of tapped layers stands and
in what their loaders ignore without a word.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from drafters.errors import UserError
from drafters.formats.dialect import Dialect, Ours, Theirs, refuse
from drafters.formats.eagle3 import (
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
from drafters.shape import usual_taps
from drafters.target import Target

_ARCHITECTURE = "LlamaForCausalLMEagle3"
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Flat:
    """One user of the flat dialect.

    Args:
        name: of the format.
        names: its prefixes.
        architecture: that only its files have; "": of no matter.
        written: whether we write for it.
        layers: that it can hold; 0: any number.
        always_tables: whether it wants the id tables with a whole vocabulary too.
        ignored: options that its code does not read: what they are when it runs.
        fixed_taps: whether its code reads the default layers whatever the file says.
    """

    name: str
    names: Names
    architecture: str = ""
    written: bool = True
    layers: int = 0
    always_tables: bool = True
    ignored: Mapping[str, bool] | None = None
    fixed_taps: bool = False


FLAT = (
    Flat(
        "safeai",
        Names(first="midlayer"),
        layers=1,
        ignored={"norm_before_residual": False, "tap_norm": False, "norm_output": False},
        fixed_taps=True,
    ),
    Flat("vllm", Names(first="midlayer"), always_tables=False),
    Flat(
        "sglang",
        Names(first="midlayer", later="additional_layers.{before}"),
        ignored={"norm_before_residual": False},
    ),
    Flat("automodel", Names(prefix="model."), written=False),
    Flat("deepspec", Names(), architecture="Qwen3Eagle3Model", written=False),
    Flat("modelopt", Names(), written=False),
)


def _write(flat: Flat, ours: Ours, target: Target | None) -> Theirs:
    options, shape = ours.options, ours.shape
    refuse(
        FAMILY,
        flat.name,
        {
            "qk_norm": options["qk_norm"],
            "attention_bias": options["attention_bias"],
            f"layers = {options['layers']}": 0 < flat.layers < options["layers"],
        },
    )
    taps = list(options["taps"])
    dtype = str(ours.dtype).removeprefix("torch.")
    ids = ours.ids
    config = {
        "architectures": [_ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": options["layers"],
        **write_sizes(shape),
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.vocab_size if ids is None else len(ids),
        "target_hidden_size": shape.hidden_size,
        "num_target_layers": shape.num_layers,
        _IDS: [k + 1 for k in taps],
        "eagle_config": {
            _IDS: taps,
            "use_aux_hidden_state": True,
            "norm_before_residual": options["norm_before_residual"],
            "norm_before_fc": False,
            "norm_output": options["norm_output"],
        },
        "norm_before_residual": options["norm_before_residual"],
        "norm_before_fc": False,
        "fc_norm": options["tap_norm"],
        "norm_output": options["norm_output"],
        "bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    tensors: dict[str, Tensor] = to_theirs(ours.tensors, table(options, shape, flat.names))
    if ids is not None or flat.always_tables:
        tensors |= id_tables(ids, shape.vocab_size)
    return Theirs(config, tensors, _lost(flat, ours))


def _lost(flat: Flat, ours: Ours) -> tuple[str, ...]:
    """Return what is written and then not read by this user's code."""
    ignored = flat.ignored or {}
    lost = [
        f"{name} = {str(ours.options[name]).lower()} (its code runs with {str(value).lower()})"
        for name, value in ignored.items()
        if ours.options[name] != value
    ]
    taps, usual = tuple(ours.options["taps"]), usual_taps(ours.shape.num_layers)
    if flat.fixed_taps and taps != usual:
        lost.append(f"taps = {list(taps)} (its code reads the outputs of layers {list(usual)})")
    return tuple(lost)


def _claims(flat: Flat, foreign: Foreign) -> bool:
    if "speculators_model_type" in foreign.config:
        return False
    if flat.architecture and foreign.config.get("architectures") != [flat.architecture]:
        return False
    names = flat.names
    return foreign.has(f"{names.prefix}fc.weight", f"{names.layer(0)}.hidden_norm.weight")


def _read(flat: Flat, foreign: Foreign, target: Target) -> Ours:
    config, folder = foreign.config, foreign.folder
    eagle = foreign.section("eagle_config")
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is not int:
        raise UserError(f"{folder}: vocab_size is {vocab_size!r}: give the target's")
    shape = read_sizes(config, folder, target.shape.num_layers, vocab_size)
    options = {
        "layers": config.get("num_hidden_layers", 1),
        **flags({**eagle, **config}, folder, residual_absent=False),
    }
    names = flat.names
    if foreign.has("additional_layers.0.self_attn.o_proj.weight"):
        names = Names(names.prefix, names.first, "additional_layers.{before}")
    return read(foreign, target, names, shape, _taps(foreign), options)


def _taps(foreign: Foreign) -> list[int] | None:
    """Return the listed taps in our numbering; None if there is no list.

    Raises:
        UserError: if two lists name different layers, or one is not a list of numbers.
    """
    config = foreign.config
    listed = {
        _IDS: (config.get(_IDS), 1),
        f"eagle_config.{_IDS}": (foreign.section("eagle_config").get(_IDS), 0),
        "target_layer_ids": (config.get("target_layer_ids"), 0),
    }
    read_lists = {key: layer_list(foreign, key, ids, start) for key, (ids, start) in listed.items()}
    found = {key: taps for key, taps in read_lists.items() if taps is not None}
    different = {tuple(taps) for taps in found.values()}
    if len(different) > 1:
        raise UserError(
            f"{foreign.folder}: its lists name different layers, as outputs of layers counted from "
            f"0: {found}"
        )
    return next(iter(found.values()), None)


DIALECTS = tuple(
    Dialect(
        flat.name,
        FAMILY,
        OPTIONS,
        partial(_write, flat) if flat.written else None,
        partial(_read, flat),
        partial(_claims, flat),
    )
    for flat in FLAT
)

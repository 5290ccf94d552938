"""EAGLE-3: what its dialects share. Tensor names, tapped layers, and the checks on reading.

Our taps are outputs of layers counted from 0; vLLM, speculators and EAGLE's own code count the
embedding as 0, so their number is ours plus one. SGLang, SpecForge and ModelOpt count as we do.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafters.errors import UserError
from drafters.formats.dialect import Ours
from drafters.formats.foreign import Foreign
from drafters.formats.id_tables import D2T, T2D, read_ids
from drafters.formats.keys import IDS, Key, take
from drafters.formats.layer_keys import layer_keys
from drafters.formats.llama_config import flag
from drafters.layers import LayerKind
from drafters.shape import TargetShape, usual_taps
from drafters.target import Target

FAMILY = "eagle"
_TRAINING = {"unroll", "head", "init_layer", "init_embedding", "init_fusion", "init_head"}
_NORMS = {"norm_before_residual", "tap_norm", "norm_output", "qk_norm"}
OPTIONS = frozenset({"taps", "layers", "draft_vocab_size", "attention_bias"} | _NORMS | _TRAINING)
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True)
class Names:
    """How a dialect prefixes its tensors.

    Args:
        prefix: before all but the head and the id tables.
        first: of layer 0.
        later: of layer i >= 1; may use {i} and {before} = i - 1.
    """

    prefix: str = ""
    first: str = "layers.0"
    later: str = "layers.{i}"

    def layer(self, i: int) -> str:
        """Return a layer's prefix."""
        return self.prefix + (self.later.format(i=i, before=i - 1) if i else self.first)


def table(options: Mapping[str, Any], shape: TargetShape, names: Names) -> list[Key]:
    """Return the key table of a drafter with these options."""
    prefix = names.prefix
    keys = [
        Key("fusion.weight", (f"{prefix}fc.weight",)),
        Key("norm.weight", (f"{prefix}norm.weight",)),
        Key("head.weight", (HEAD,)),
    ]
    if options["tap_norm"]:
        each = tuple(f"{prefix}fc_norm.{k}.weight" for k in range(len(options["taps"])))
        keys.append(Key("tap_norm", each, stacked=True))
    for i in range(options["layers"]):
        kind = LayerKind(wide=i == 0, qk_norm=options["qk_norm"], bias=options["attention_bias"])
        keys += layer_keys(f"layers.{i}", names.layer(i), shape, kind)
    return keys


def flags(
    config: Mapping[str, Any], folder: Path, residual_absent: bool | None
) -> dict[str, object]:
    """Return the options that a config's flags say.

    Args:
        config: where the flags stand.
        folder: for messages.
        residual_absent: what the absence of norm_before_residual means; None: it must be there.

    Raises:
        UserError: on a flag that our eagle cannot follow.
    """
    if flag(config, "norm_before_fc", folder):
        raise UserError(f"{folder}: norm_before_fc is true: no norm over all taps is known here")
    if flag(config, "tie_word_embeddings", folder):
        raise UserError(
            f"{folder}: tie_word_embeddings is true, which ties the draft head to the embedding: "
            "write false"
        )
    return {
        "norm_before_residual": flag(config, "norm_before_residual", folder, residual_absent),
        "tap_norm": flag(config, "fc_norm", folder),
        "norm_output": flag(config, "norm_output", folder),
    }


def layer_list(foreign: Foreign, name: str, ids: object, start: int) -> list[int] | None:
    """Return a list of tapped layers in our numbering, None if there is none or it is empty.

    Args:
        foreign: for messages.
        name: of the list.
        ids: what stands there.
        start: the number of the first layer's output.

    Raises:
        UserError: if it is not a list of numbers.
    """
    if ids is None or ids == []:
        return None
    if not isinstance(ids, list) or not all(type(k) is int for k in ids):
        raise UserError(f"{foreign.folder}: {name} is {ids!r}: give a list of layers")
    return [k - start for k in ids]


def read(
    foreign: Foreign,
    target: Target,
    names: Names,
    shape: TargetShape,
    taps: Sequence[int] | None,
    options: Mapping[str, Any],
    besides: Iterable[str] = (),
) -> Ours:
    """Read a folder as an eagle.

    Args:
        foreign: the folder.
        target: that the drafter is for.
        names: of the dialect.
        shape: of its layers.
        taps: tapped layers in our numbering; None: the usual ones.
        options: what the config says beyond the sizes.
        besides: tensors that the dialect reads in another way; the embedding among them is not
            compared with the target's.

    Raises:
        UserError: names what is missing, unused, of another size or does not fit the target.
    """
    _check_target(foreign, shape, target)
    prefix = names.prefix
    ids = read_ids(foreign, foreign.matrix(HEAD)[0], shape.vocab_size)
    qk_norm = f"{names.layer(0)}.self_attn.q_norm.weight" in foreign.headers
    full: dict[str, Any] = {
        "attention_bias": False,
        **options,
        "taps": _checked_taps(foreign, taps, prefix, shape),
        "qk_norm": qk_norm,
        "draft_vocab_size": 0 if ids is None else len(ids),
    }
    layers = full["layers"]
    if type(layers) is not int or not 1 <= layers <= len(foreign.headers):
        raise UserError(f"{foreign.folder}: num_hidden_layers is {layers!r}: give what it has")
    embedding = prefix + EMBEDDING
    keys = table(full, shape, names)
    apart = set(besides)
    tensors = take(foreign, FAMILY, full, shape, keys, {D2T, T2D, embedding} | apart)
    if ids is not None:
        tensors[IDS] = ids
    lost = () if embedding in apart else _embedding_lost(foreign, embedding, target)
    return Ours(FAMILY, full, shape, tensors, lost=lost)


def _check_target(foreign: Foreign, shape: TargetShape, target: Target) -> None:
    for what, found in (("hidden_size", shape.hidden_size), ("vocab_size", shape.vocab_size)):
        wanted = getattr(target.shape, what)
        if found != wanted:
            raise UserError(
                f"{foreign.folder}: its {what} is {found}, {target.name} has {wanted}: give the "
                "target that the drafter was made for"
            )
    size = foreign.config.get("draft_vocab_size")
    rows = foreign.matrix(HEAD)[0]
    if size is not None and size != rows:
        raise UserError(f"{foreign.folder}: draft_vocab_size is {size}, {HEAD} has {rows} rows")


def _checked_taps(
    foreign: Foreign, taps: Sequence[int] | None, prefix: str, shape: TargetShape
) -> list[int]:
    """Return the taps if the fusion's width fits them."""
    chosen = list(usual_taps(shape.num_layers) if taps is None else taps)
    width = foreign.matrix(f"{prefix}fc.weight")[1]
    narrower = width == (len(chosen) - 1) * shape.hidden_size
    if narrower and chosen[-1] == shape.num_layers - 1:
        # lists of speculators' data end with the target's last state, which is no tap
        chosen = chosen[:-1]
    if len(chosen) * shape.hidden_size != width:
        raise UserError(
            f"{foreign.folder}: {prefix}fc.weight reads {width} numbers, and {len(chosen)} layers "
            f"of {shape.hidden_size} are tapped ({chosen})"
        )
    return chosen


def _embedding_lost(foreign: Foreign, name: str, target: Target) -> tuple[str, ...]:
    """Compare a stored embedding with the target's, which is what drafts here."""
    if name not in foreign.headers:
        return ()
    wanted = (target.shape.vocab_size, target.shape.hidden_size)
    if foreign.shape(name) != wanted:
        raise UserError(f"{foreign.folder}: {name} is {list(foreign.shape(name))}, not {wanted}")
    theirs = foreign.load([name])[name].to(torch.bfloat16)
    ours = target.embed(torch.arange(wanted[0], device=target.device)).to("cpu", torch.bfloat16)
    if torch.equal(theirs, ours):
        return ()
    return (f"{name}, which is not the target's own (the target's is used)",)

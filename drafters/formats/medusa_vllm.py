"""Medusa as vLLM reads it: named blocks and heads, and a vocabulary that may be reduced.

vLLM ignores tensors whose names it does not know, so that a file of another dialect loads there as
random heads. Its token_map holds absolute ids, unlike d2t of the EAGLE-3 dialects.
"""

from typing import Any

import torch
from torch import Tensor

from drafters.errors import UserError
from drafters.formats.dialect import Dialect, Ours, Theirs
from drafters.formats.foreign import Foreign
from drafters.formats.keys import IDS, take, to_theirs
from drafters.formats.llama_config import flag
from drafters.formats.medusa_heads import FAMILY, OPTIONS, Names, count
from drafters.target import Target

NAME = "medusa-vllm"
_OWN = Names("blocks.{h}.layers.{b}.{x}", "lm_heads.{h}.weight")
_SHARED = Names("blocks.{h}.layers.{b}.{x}", "lm_head.weight")
_MAP = "token_map"


def _write(ours: Ours, target: Target | None) -> Theirs:
    options, shape, ids = ours.options, ours.shape, ours.ids
    names = _SHARED if options["shared_head"] else _OWN
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "truncated_vocab_size": shape.vocab_size if ids is None else len(ids),
        "num_heads": options["heads"],
        "num_hidden_layers": options["blocks"],
        "medusa_fc_bias": True,
        "original_lm_head": options["shared_head"],
        "logit_scale": 1.0,
        "tie_word_embeddings": False,
        "torch_dtype": str(ours.dtype).removeprefix("torch."),
    }
    tensors = to_theirs(ours.tensors, names.table(options))
    if ids is not None:
        tensors[_MAP] = ids.clone()
    return Theirs(config, tensors)


def _read(foreign: Foreign, target: Target) -> Ours:
    config = foreign.config
    if not flag(config, "medusa_fc_bias", foreign.folder):
        raise UserError(f"{foreign.folder}: medusa_fc_bias is false: blocks have a bias here")
    if config.get("logit_scale", 1.0) != 1.0:
        raise UserError(f"{foreign.folder}: logit_scale is {config['logit_scale']}: give 1")
    shared = flag(config, "original_lm_head", foreign.folder)
    names = _SHARED if shared else _OWN
    rows = foreign.matrix(names.output(0, 1))[0]
    options: dict[str, Any] = {
        "heads": count(config, foreign, "num_heads", "medusa_num_heads"),
        "blocks": count(config, foreign, "num_hidden_layers", "medusa_num_layers"),
        "shared_head": shared,
        "draft_vocab_size": 0,
    }
    ids = _read_map(foreign, rows, target.shape.vocab_size)
    if ids is not None:
        options["draft_vocab_size"] = len(ids)
    tensors = take(foreign, FAMILY, options, target.shape, names.table(options), (_MAP,))
    if ids is not None:
        tensors[IDS] = ids
    return Ours(FAMILY, options, target.shape, tensors)


def _read_map(foreign: Foreign, rows: int, vocab_size: int) -> Tensor | None:
    """Return the kept ids [K]; None if all are kept.

    Raises:
        UserError: if they are missing though K < V, or not ascending ids of the target.
    """
    if not foreign.has(_MAP):
        if rows != vocab_size:
            raise UserError(
                f"{foreign.folder}: its heads have {rows} of the target's {vocab_size} ids and "
                f"{_MAP} is missing, so nothing says which ids they are"
            )
        return None
    if foreign.shape(_MAP) != (rows,) or rows == 0:
        raise UserError(f"{foreign.folder}: {_MAP} is {list(foreign.shape(_MAP))}, not [{rows}]")
    ids = foreign.load([_MAP])[_MAP].to(torch.int64)
    if not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise UserError(
            f"{foreign.folder}: {_MAP} must hold ascending ids from 0 to {vocab_size - 1}; it runs "
            f"from {int(ids.min())} to {int(ids.max())}"
        )
    return None if rows == vocab_size else ids


def _claims(foreign: Foreign) -> bool:
    return foreign.has(_OWN.block.format(h=0, b=0, x="weight"))


DIALECT = Dialect(NAME, FAMILY, OPTIONS, _write, _read, _claims)

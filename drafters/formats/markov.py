"""DSpark's two heads in its files: the Markov head and the confidence head.

Their first Markov matrix has a row for every id of the target. Ours has one for every kept id and
one row for all others, which is written as many times as there are such ids.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafters.errors import UserError
from drafters.formats.dialect import Ours
from drafters.formats.foreign import Foreign
from drafters.formats.keys import Key
from drafters.vocab import place_of

MARKOV = frozenset({"markov_rank", "confidence"})
ROWS = "markov_head.markov_w1.weight"
_BEFORE, _TEMPERATURE = "correction.before.weight", "correction.temperature"
APART = frozenset({_BEFORE, _TEMPERATURE})  # ours that no table holds


def markov_keys(options: Mapping[str, Any]) -> list[Key]:
    """Return the key table of both heads, the first Markov matrix apart."""
    keys: list[Key] = []
    if options["markov_rank"]:
        keys.append(Key("correction.after.weight", ("markov_head.markov_w2.weight",)))
    if options["confidence"]:
        theirs = "confidence_head.proj"
        keys += [Key(f"correction.sure.{x}", (f"{theirs}.{x}",)) for x in ("weight", "bias")]
    return keys


def write_markov(ours: Ours) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors that no table holds, by their names, and what has no place at all."""
    theirs: dict[str, Tensor] = {}
    if _BEFORE in ours.tensors:
        rows = ours.tensors[_BEFORE]
        every = torch.arange(ours.shape.vocab_size)
        theirs[ROWS] = rows[place_of(every, ours.ids, len(rows) - 1)]
    temperature = ours.tensors.get(_TEMPERATURE)
    tuned = temperature is not None and bool((temperature != 1).any())
    return theirs, ("the temperatures of its confidence",) if tuned else ()


def read_markov(
    foreign: Foreign, ids: Tensor | None, vocab_size: int, options: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return our tensors that no table holds.

    Raises:
        UserError: if ids that are not kept have rows of their own.
    """
    ours: dict[str, Tensor] = {}
    if options["confidence"]:
        ours[_TEMPERATURE] = torch.ones(options["slots"])
    if not options["markov_rank"]:
        return ours
    wanted = (vocab_size, options["markov_rank"])
    if foreign.shape(ROWS) != wanted:
        raise UserError(f"{foreign.folder}: {ROWS} is {list(foreign.shape(ROWS))}, not {wanted}")
    rows = foreign.load([ROWS])[ROWS]
    kept = torch.arange(vocab_size) if ids is None else ids
    others = torch.ones(vocab_size, dtype=torch.bool)
    others[kept] = False
    rest = rows[others]
    if len(rest) and not bool((rest == rest[0]).all()):
        raise UserError(
            f"{foreign.folder}: ids outside the draft vocabulary have Markov rows of their own; "
            "here they share one"
        )
    shared = rest[:1] if len(rest) else torch.zeros_like(rows[:1])
    ours[_BEFORE] = torch.cat((rows[kept], shared))
    return ours

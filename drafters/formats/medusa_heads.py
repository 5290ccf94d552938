"""Medusa heads as FasterDecoding writes them, and as TensorRT-LLM and ModelOpt name them.

Every head owns an output matrix over the whole vocabulary. Head k guesses the same token here and
there: x[t + 2 + k].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drafters.errors import UserError
from drafters.formats.dialect import Dialect, Ours, Theirs, needed
from drafters.formats.foreign import Foreign
from drafters.formats.keys import Key, take, to_theirs
from drafters.target import Target

FAMILY = "medusa"
OPTIONS = frozenset({"heads", "blocks", "draft_vocab_size", "shared_head"})


@dataclass(frozen=True)
class Names:
    """How a dialect calls the tensors of head {h}, block {b} of {n}; {x} is weight or bias."""

    block: str
    head: str

    def table(self, options: Mapping[str, Any]) -> list[Key]:
        """Return the key table; with a shared head only the first output matrix is in it."""
        heads, blocks = options["heads"], options["blocks"]
        keys = [
            Key(f"heads.{h}.{b}.linear.{x}", (self.block.format(h=h, b=b, x=x),))
            for h in range(heads)
            for b in range(blocks)
            for x in ("weight", "bias")
        ]
        outputs = 1 if options["shared_head"] else heads
        heads_of = (Key(f"outputs.{h}.weight", (self.output(h, blocks),)) for h in range(outputs))
        return [*keys, *heads_of]

    def output(self, head: int, blocks: int) -> str:
        """Return the name of a head's output matrix."""
        return self.head.format(h=head, n=blocks)


_ORIGINAL = Names("{h}.{b}.linear.{x}", "{h}.{n}.weight")
_NESTED = Names("medusa_heads.{h}.medusa_layers.{b}.linear.{x}", "medusa_heads.{h}.lm_head.weight")


def count(config: Mapping[str, Any], foreign: Foreign, *names: str) -> int:
    """Return a whole number of 1 or more under the first name that is there.

    Raises:
        UserError: if there is none, or more than there are tensors.
    """
    value = next((config[name] for name in names if name in config), None)
    if type(value) is not int or not 1 <= value <= len(foreign.headers):
        raise UserError(
            f"{foreign.folder}: {names[0]} is {value!r}, with {len(foreign.headers)} tensors in "
            "the file: give what it has"
        )
    return value


def whole_head(ours: Ours, target: Target | None, rows: Tensor) -> Tensor:
    """Return an output matrix [V, D]: the drafter's rows, the target's own where it has none."""
    if ours.ids is None:
        return rows
    target = needed(target, "the head's rows that the drafter does not keep")
    whole = target.head_rows(torch.arange(target.shape.vocab_size)).to("cpu", rows.dtype)
    whole[ours.ids] = rows
    return whole


def _write(ours: Ours, target: Target | None) -> Theirs:
    options, shape = ours.options, ours.shape
    heads, blocks = options["heads"], options["blocks"]
    tensors = to_theirs(ours.tensors, _ORIGINAL.table(options))
    for h in range(heads):
        rows = ours.tensors[f"outputs.{0 if options['shared_head'] else h}.weight"]
        tensors[_ORIGINAL.output(h, blocks)] = whole_head(ours, target, rows).clone()
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "llama",
        "version": "2",
        "medusa_num_heads": heads,
        "medusa_num_layers": blocks,
        "base_model_name_or_path": ours.made_for.get("name", ""),
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(ours.dtype).removeprefix("torch."),
    }
    lost: tuple[str, ...] = ()
    if ours.ids is not None:
        lost = (
            f"draft_vocab_size = {len(ours.ids)} (its heads have all {shape.vocab_size} ids: the "
            "rows of the others are the target's own)",
        )
    return Theirs(config, tensors, lost, "medusa_lm_head.safetensors")


def _read(names: Names, foreign: Foreign, target: Target) -> Ours:
    config = foreign.config
    heads = count(config, foreign, "medusa_num_heads", "num_medusa_heads")
    blocks = count(config, foreign, "medusa_num_layers", "num_medusa_layers")
    options = {"heads": heads, "blocks": blocks, "draft_vocab_size": 0, "shared_head": False}
    tensors = take(foreign, FAMILY, options, target.shape, names.table(options))
    first = tensors["outputs.0.weight"]
    if heads > 1 and all(torch.equal(first, tensors[f"outputs.{h}.weight"]) for h in range(heads)):
        options["shared_head"] = True
        for h in range(1, heads):
            del tensors[f"outputs.{h}.weight"]
    return Ours(FAMILY, options, target.shape, tensors)


def _claims(names: Names, foreign: Foreign) -> bool:
    return foreign.has(names.block.format(h=0, b=0, x="weight"))


def _dialect(name: str, names: Names, *, written: bool) -> Dialect:
    write = _write if written else None
    return Dialect(name, FAMILY, OPTIONS, write, partial(_read, names), partial(_claims, names))


DIALECTS = (
    _dialect("medusa", _ORIGINAL, written=True),
    _dialect("medusa-trt", _NESTED, written=False),
)

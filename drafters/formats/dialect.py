"""Dialect: one format of the outside world for one drafter family, and what passes through it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters.errors import UserError
from drafters.formats.foreign import Foreign
from drafters.shape import TargetShape
from drafters.target import Target

WEIGHTS = "model.safetensors"  # of our folders and of most dialects


@dataclass(frozen=True)
class Ours:
    """A drafter as our own folders hold it.

    Args:
        family: its name in the registry.
        options: it is built from.
        shape: it is built from.
        tensors: by name.
        made_for: fields of the target's fingerprint.
        lost: what of a foreign drafter could not be taken over; for messages.
    """

    family: str
    options: Mapping[str, Any]
    shape: TargetShape
    tensors: Mapping[str, Tensor]
    made_for: Mapping[str, Any] = field(default_factory=dict[str, Any])
    lost: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Return the narrowest dtype that holds all weights exactly."""
        dtypes = [t.dtype for t in self.tensors.values() if t.is_floating_point()]
        widest = dtypes[0]
        for dtype in dtypes:
            widest = torch.promote_types(widest, dtype)
        return widest

    @property
    def ids(self) -> Tensor | None:
        """Return the draft vocabulary [K], None for the target's own."""
        return self.tensors.get("vocabulary.ids")


def save_folder(theirs: "Theirs", folder: Path) -> None:
    """Write config.json, the weights as safetensors and, where there is one, the tokenizer."""
    save_file(theirs.tensors, folder / theirs.weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(theirs.config, indent=2) + "\n")
    if theirs.tokenizer is not None:
        theirs.tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class Theirs:
    """A drafter as a dialect holds it.

    Args:
        config: for config.json.
        tensors: by the dialect's names, contiguous, sharing no memory.
        lost: what the dialect, or whoever reads it, leaves out of the drafter; for messages.
        weights: name of the weights' file.
        tokenizer: goes into the folder where the dialect has one.
        save: writes the folder.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    lost: tuple[str, ...] = ()
    weights: str = WEIGHTS
    tokenizer: Any = None
    save: Callable[["Theirs", Path], None] = save_folder


@dataclass(frozen=True)
class Dialect:
    """One format for one family; a new family brings its own.

    Args:
        name: as command lines call the format; families may share one.
        family: the drafters that it holds.
        options: of the family that it knows what to do with; a drafter with another one set is
            refused, since what that makes it compute is not in these files.
        write: makes a dialect's drafter of ours, with the target's weights if a target is given.
        read: makes ours of a folder, for a target.
        claims: whether a folder is in this format.
    """

    name: str
    family: str
    options: frozenset[str]
    write: Callable[[Ours, Target | None], Theirs] | None = None
    read: Callable[[Foreign, Target], Ours] | None = None
    claims: Callable[[Foreign], bool] | None = None

    @property
    def directions(self) -> str:
        """Return "to", "from" or "to, from"."""
        return ", ".join(word for word, way in (("to", self.write), ("from", self.read)) if way)


def needed(target: Target | None, why: str) -> Target:
    """Return the target.

    Raises:
        UserError: if none was given.
    """
    if target is None:
        raise UserError(f"this format holds {why} of the target's: give --target too")
    return target


def check_options(ours: Ours, dialect: Dialect) -> None:
    """Refuse a drafter with an option set that the dialect has never heard of.

    Raises:
        UserError: names the option.
    """
    for name in sorted(set(ours.options) - dialect.options):
        if ours.options[name]:
            raise UserError(
                f"the format {dialect.name} has no place for {name} = {ours.options[name]!r} of "
                f"this {ours.family} drafter"
            )


def refuse(family: str, name: str, reasons: Mapping[str, object]) -> None:
    """Refuse a drafter that a dialect has no place for.

    Raises:
        UserError: if one of the reasons holds.
    """
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise UserError(
            f"the format {name} has no place for {' and '.join(found)} of this {family} drafter"
        )

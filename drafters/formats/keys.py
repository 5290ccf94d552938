"""Key tables: what a dialect calls our tensors, as data, and the two ways through such a table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.base import NeuralDrafter
from drafters.errors import UserError
from drafters.formats.foreign import Foreign
from drafters.registry import build_drafter
from drafters.shape import TargetShape

IDS = "vocabulary.ids"  # of ours; every dialect has a table of its own kind for it


@dataclass(frozen=True)
class Key:
    """One tensor of ours and its name, or names, in a dialect.

    Args:
        ours: name in our state dict.
        theirs: the dialect's names; several are parts of ours along its first dimension.
        rows: of each part, where there are several.
        stacked: the parts lack ours' first dimension.
    """

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    stacked: bool = False

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        """Return the dialect's parts of our tensor, as views."""
        if self.stacked:
            return whole.unbind(0)
        return whole.split(list(self.rows)) if self.rows else [whole]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return our tensor of the dialect's parts."""
        if self.stacked:
            return torch.stack(list(parts))
        return torch.cat(list(parts)) if self.rows else parts[0].contiguous()


def to_theirs(ours: Mapping[str, Tensor], table: Iterable[Key]) -> dict[str, Tensor]:
    """Return the dialect's tensors; every one of ours but the draft ids must be in the table."""
    rest = set(ours) - {IDS}
    theirs: dict[str, Tensor] = {}
    for key in table:
        rest.remove(key.ours)
        parts = key.split(ours[key.ours])
        theirs.update(zip(key.theirs, (part.contiguous().clone() for part in parts), strict=True))
    assert not rest, f"no key for {sorted(rest)}"
    return theirs


def to_ours(theirs: Mapping[str, Tensor], table: Iterable[Key]) -> dict[str, Tensor]:
    """Return our tensors of the dialect's."""
    return {key.ours: key.join([theirs[name] for name in key.theirs]) for key in table}


def expected(
    family: str, options: Mapping[str, object], shape: TargetShape, table: Iterable[Key]
) -> dict[str, tuple[int, ...]]:
    """Return the dialect's names and shapes of a drafter; nothing is allocated.

    Raises:
        UserError: if the family cannot be built so.
    """
    with torch.device("meta"):
        built = build_drafter(family, options, shape)
    assert isinstance(built, NeuralDrafter)
    ours = built.state_dict()
    return {
        name: tuple(part.shape)
        for key in table
        for name, part in zip(key.theirs, key.split(ours[key.ours]), strict=True)
    }


def take(
    foreign: Foreign,
    family: str,
    options: Mapping[str, object],
    shape: TargetShape,
    table: Sequence[Key],
    besides: Iterable[str] = (),
) -> dict[str, Tensor]:
    """Read a foreign folder's tensors as ours, once all names and shapes are right.

    Args:
        foreign: the folder.
        family: of drafters.
        options: of the drafter that the config describes.
        shape: that it is built from.
        table: the dialect's names.
        besides: tensors that the dialect reads in another way.

    Raises:
        UserError: names missing and unused tensors, or the first of another shape.
    """
    wanted = expected(family, options, shape, table)
    found = set(foreign.headers) - set(besides)
    missing, unused = sorted(set(wanted) - found), sorted(found - set(wanted))
    if missing or unused:
        raise UserError(f"{foreign.folder}: missing tensors {missing}, unused tensors {unused}")
    for name, size in wanted.items():
        if foreign.shape(name) != size:
            raise UserError(
                f"{foreign.folder}: {name} is {list(foreign.shape(name))}, its config asks for "
                f"{list(size)}"
            )
    return to_ours(foreign.load(wanted), table)

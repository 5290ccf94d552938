"""Convert a drafter's folder: ours into a foreign format, or a foreign one into ours."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from drafters.base import NeuralDrafter
from drafters.checkpoint import load_drafter, write_folder
from drafters.errors import UserError
from drafters.fingerprint import Fingerprint
from drafters.formats.dialect import WEIGHTS, Ours, Theirs, check_options
from drafters.formats.foreign import Foreign
from drafters.formats.registry import reader, writer
from drafters.shape import TargetShape
from drafters.stored import FORMAT_VERSION, read_config
from drafters.target import Target
from drafters.whole import whole_folder


def export_drafter(
    folder: str | Path,
    name: str,
    out: str | Path,
    target: Target | None = None,
    *,
    dtype: torch.dtype | None = None,
    allow_loss: bool = False,
) -> tuple[str, ...]:
    """Write one of our folders in a foreign format.

    Args:
        folder: that training wrote.
        name: of the format.
        out: a folder that does not exist yet.
        target: the drafter's; only some formats need it.
        dtype: of the written weights; None: as they are stored.
        allow_loss: whether to go on where something is lost.

    Returns:
        What was lost.

    Raises:
        UserError: the format does not hold this family, something would be lost, a weight is not
            finite, or `out` is there already.
    """
    place = _new(out)
    ours = read_ours(Path(folder), target)
    dialect = writer(name, ours.family)
    check_options(ours, dialect)
    if dtype is not None:
        tensors = {k: t.to(dtype) if t.is_floating_point() else t for k, t in ours.tensors.items()}
        ours = replace(ours, tensors=tensors)
    for key, tensor in ours.tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{folder}: {key} holds NaN or infinite numbers")
    assert dialect.write is not None
    theirs = dialect.write(ours, target)
    _weigh(theirs.lost, f"{folder} as {name}", allow_loss)
    _save(theirs, place)
    return theirs.lost


def import_drafter(
    folder: str | Path,
    out: str | Path,
    target: Target,
    name: str = "auto",
    *,
    allow_loss: bool = False,
) -> tuple[str, ...]:
    """Write a foreign folder as one of ours, and load it once.

    Args:
        folder: of a foreign drafter.
        out: a folder that does not exist yet.
        target: that the drafter is for.
        name: of the format; "auto": recognised.
        allow_loss: whether to go on where something is lost.

    Returns:
        What was lost.

    Raises:
        UserError: the folder is not safe to read, in no known format, or does not fit the target.
    """
    place = _new(out)
    foreign = Foreign.read(folder)
    dialect = reader(foreign, name)
    assert dialect.read is not None
    ours = dialect.read(foreign, target)
    _weigh(ours.lost, f"{folder} from {dialect.name}", allow_loss)
    config = {
        "format_version": FORMAT_VERSION,
        "drafter": ours.family,
        "options": dict(ours.options),
        "shape": ours.shape.to_dict(),
        "target": Fingerprint.of(target).to_dict(),
        "training": {"imported": {"format": dialect.name, "lost": list(ours.lost)}},
    }
    write_folder(place, config, ours.tensors)
    try:
        loaded = load_drafter(place, target)
    except UserError:
        shutil.rmtree(place)  # it did not exist before
        raise
    assert isinstance(loaded, NeuralDrafter)
    return ours.lost


def read_ours(folder: Path, target: Target | None) -> Ours:
    """Read one of our folders.

    Raises:
        UserError: if it is none, or was made for another target.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the one of a trained drafter")
    config = read_config(folder)
    if "drafter" not in config:
        raise UserError(
            f"{folder} is not a drafter that was trained here. If it is a causal LM, engines draft "
            "with it as it is; if it is in a foreign format, convert it with --from first"
        )
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, NeuralDrafter)
    shape = TargetShape(**config["shape"])
    stored = load_file(folder / WEIGHTS)  # in the dtypes they are stored in
    tensors = drafter.completed(stored, target)
    return Ours(drafter.name, drafter.options(), shape, tensors, config["target"])


def _new(out: str | Path) -> Path:
    place = Path(out)
    if place.exists():
        raise UserError(f"{place} exists already: give a folder that does not")
    return place


def _weigh(lost: Sequence[str], what: str, allow_loss: bool) -> None:
    if lost and not allow_loss:
        raise UserError(f"{what} loses {'; '.join(lost)}. Give --allow-loss to go on without")


def _save(theirs: Theirs, place: Path) -> None:
    """Write a foreign folder whole or not at all."""
    with whole_folder(place) as new:
        theirs.save(theirs, new)

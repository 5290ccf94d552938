"""Save and load trained drafters: model.safetensors and config.json in one folder.

A save is whole or absent: it is written beside its place and renamed. A load is exact: a missing
tensor, an unused one, an unknown field or another target is an error.
"""

import json
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.base import Drafter, NeuralDrafter
from drafters.errors import UserError
from drafters.fingerprint import Fingerprint
from drafters.formats.registry import refuse_foreign
from drafters.registry import build_drafter, causal_lm_family, joined, method
from drafters.shape import TargetShape
from drafters.target import Target

FORMAT_VERSION = 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"
_FIELDS = {"format_version", "drafter", "options", "shape", "target", "training"}


def save_drafter(
    drafter: NeuralDrafter,
    folder: str | Path,
    target: Target,
    training: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a drafter's folder; what stood there is replaced in one step.

    Args:
        drafter: its own tensors are saved.
        folder: where; parents are made.
        target: whose fingerprint is stored.
        training: how it came about (settings, measured figures): stored, never read back.
        dtype: of the saved parameters; None: as they are.
    """
    tensors = {
        name: (t.to(dtype) if dtype is not None and t.is_floating_point() else t).contiguous()
        for name, t in drafter.state_dict().items()
    }
    config = {
        "drafter": drafter.name,
        "options": drafter.options(),
        "shape": target.shape.to_dict(),
        "target": Fingerprint.of(target).to_dict(),
        "training": dict(training or {}),
    }
    return write_folder(folder, {"format_version": FORMAT_VERSION, **config}, tensors)


def write_folder(
    folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    """Write config and weights whole or not at all; what stood there is replaced in one step."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
        new = Path(work) / "new"
        new.mkdir()
        save_file(dict(tensors), new / WEIGHTS, metadata={"format": "pt"})
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        replace_folder(new, folder)
    return folder


def replace_folder(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`; a kill leaves the old one or the new one readable.

    Files are replaced one by one by rename when the folder exists: weights first, so that the
    config never describes weights that are not there.
    """
    if not folder.exists():
        new.rename(folder)
        return
    for file in sorted(new.iterdir(), key=lambda f: f.name == CONFIG):
        file.replace(folder / file.name)
    for stale in {f.name for f in folder.iterdir()} - {WEIGHTS, CONFIG}:
        path = folder / stale
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def load_drafter(spec: str | Path, target: Target | None = None) -> Drafter:
    """Load a drafter from its folder, or make one of a family without weights by name.

    Args:
        spec: a folder written by save_drafter, a Hugging Face causal LM's folder (a standalone
            draft model), or the name of a family without weights, or with weights that the target
            itself may ship; several, joined by +, draft together.
        target: refuse the drafter if it was made for another target; None: no check.

    Raises:
        UserError: says what is missing, unused, unknown or different.
    """
    folder, parts = Path(spec), parts_of(str(spec))
    if len(parts) > 1:
        return joined([load_drafter(part, target) for part in parts])
    if not folder.is_dir():
        return _without_weights(str(spec), target)
    config = read_config(folder)
    if "drafter" not in config:
        refuse_foreign(folder)
        return causal_lm_family().load(folder, target)
    shape = TargetShape(**config["shape"])
    if target is not None:
        _check_target(folder, Fingerprint(**config["target"]), target)
    drafter = build_drafter(config["drafter"], config["options"], shape)
    if not isinstance(drafter, NeuralDrafter):
        raise UserError(f"{folder}: {config['drafter']} has no weights to load")
    _load_weights(drafter, folder)
    return drafter.eval()


def parts_of(spec: str) -> list[str]:
    """Return the drafters that a + joins; a folder whose name has one is one drafter.

    >>> parts_of("ngram+runs/eagle/best")
    ['ngram', 'runs/eagle/best']

    Raises:
        UserError: if nothing stands on one side of a +.
    """
    head = spec.partition(":")[0]
    if "+" not in spec or ("+" in head and Path(head).is_dir()):
        return [spec]
    parts = [part.strip() for part in spec.split("+")]
    if not all(parts):
        raise UserError(f"drafter {spec!r}: give A+B, the folder or name of a drafter on each side")
    return parts


def _without_weights(name: str, target: Target | None) -> Drafter:
    kind = method(name) if "/" not in name else None
    if kind is None:
        raise UserError(
            f"drafter {name}: no such folder, and not a drafter without weights; give the folder "
            "that training or publishing wrote"
        )
    if target is None:
        raise UserError(f"drafter {name} is made for a target: give the target too")
    if issubclass(kind, NeuralDrafter):
        return kind.shipped(target)
    return kind.build({}, target.shape)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a drafter's folder, or of a causal LM's.

    Raises:
        UserError: if it cannot be read, or has fields of another version.
    """
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: config.json cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{folder}: config.json holds no object")
    if "drafter" in config:
        unknown, missing = set(config) - _FIELDS, _FIELDS - set(config)
        if unknown or missing:
            raise UserError(
                f"{folder}: config.json has unknown fields {sorted(unknown)}, "
                f"lacks {sorted(missing)}: it was written by another version"
            )
        if config["format_version"] != FORMAT_VERSION:
            raise UserError(
                f"{folder}: format version {config['format_version']}, this is {FORMAT_VERSION}"
            )
    return config


def _check_target(folder: Path, made_for: Fingerprint, target: Target) -> None:
    here = Fingerprint.of(target)
    found = made_for.difference(here)
    if found is None:
        return
    field, theirs, ours = found
    same_base = (made_for.base and made_for.base in (here.base, here.name)) or (
        here.base and here.base == made_for.name
    )
    if field == "weights" and same_base:
        warnings.warn(
            f"{folder} was made for {made_for.name}; {target.name} is another conversion of the "
            "same model, so acceptance may differ a little",
            stacklevel=3,
        )
        return
    raise UserError(
        f"{folder} was made for another target ({made_for.name}): its {field} is {theirs}, "
        f"{target.name} has {ours}; give the target it was trained on, or train one for this"
    )


def _load_weights(drafter: NeuralDrafter, folder: Path) -> None:
    """Load every tensor exactly: same names, same shapes."""
    path = folder / WEIGHTS
    expected = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    try:
        with safe_open(path, "pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}): safetensors only") from error
    missing, unused = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unused:
        raise UserError(f"{path}: missing tensors {missing}, unused tensors {unused}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise UserError(f"{path}: {name} is {found[name]}, the config asks for {shape}")
    drafter.load_state_dict(load_file(path))

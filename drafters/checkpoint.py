"""Save and load trained drafters: model.safetensors and config.json in one folder.

A save is whole or absent: it is written beside its place and renamed. The weights' file carries its
own copy of the config, so a single rename replaces both. A load is exact: a missing tensor, an
unused one, an unknown field or another target is an error.
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

from drafters.base import Drafter, NeuralDrafter
from drafters.errors import UserError
from drafters.fingerprint import Fingerprint
from drafters.registry import build_drafter, causal_lm_family, method
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
    config = {
        "format_version": FORMAT_VERSION,
        "drafter": drafter.name,
        "options": drafter.options(),
        "shape": target.shape.to_dict(),
        "target": Fingerprint.of(target).to_dict(),
        "training": dict(training or {}),
    }
    tensors = {
        name: (t.to(dtype) if dtype is not None and t.is_floating_point() else t).contiguous()
        for name, t in drafter.state_dict().items()
    }
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
        new = Path(work) / "new"
        new.mkdir()
        text = json.dumps(config, indent=2) + "\n"
        save_file(tensors, new / WEIGHTS, metadata={"format": "pt", CONFIG: text})
        (new / CONFIG).write_text(text)
        replace_folder(new, folder)
    return folder


def replace_folder(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`; a kill leaves the old one or the new one readable.

    Files are replaced one by one by rename when the folder exists, weights first: from then on the
    config inside them counts, whatever a kill leaves beside them.
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
            draft model), or the name of a family without weights.
        target: refuse the drafter if it was made for another target; None: no check.

    Raises:
        UserError: says what is missing, unused, unknown or different.
    """
    folder = Path(spec)
    if not folder.is_dir():
        return _without_weights(str(spec), target)
    config = _read_config(folder)
    if "drafter" not in config:
        return causal_lm_family().load(folder, target)
    config = _saved_with(folder / WEIGHTS, config)
    shape = TargetShape(**config["shape"])
    if target is not None:
        _check_target(folder, Fingerprint(**config["target"]), target)
    drafter = build_drafter(config["drafter"], config["options"], shape)
    if not isinstance(drafter, NeuralDrafter):
        raise UserError(f"{folder}: {config['drafter']} has no weights to load")
    _load_weights(drafter, folder)
    return drafter.eval()


def _without_weights(name: str, target: Target | None) -> Drafter:
    kind = method(name) if "/" not in name else None
    if kind is None or issubclass(kind, NeuralDrafter):
        raise UserError(
            f"drafter {name}: no such folder, and not a drafter without weights; give the folder "
            "that training or publishing wrote"
        )
    if target is None:
        raise UserError(f"drafter {name} is made for a target: give the target too")
    return kind.build({}, target.shape)


def _read_config(folder: Path) -> dict[str, Any]:
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


def _saved_with(weights: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config that the weights were saved with: a kill may leave an older one beside."""
    try:
        with safe_open(weights, "pt") as file:
            text = (file.metadata() or {}).get(CONFIG)
    except (OSError, SafetensorError):
        return config  # loading the weights says what is wrong with them
    if text is None or json.dumps(json.loads(text)) == json.dumps(config):  # NaN equals NaN
        return config
    warnings.warn(
        f"{weights.parent}: {CONFIG} is not what {WEIGHTS} was saved with, which was interrupted; "
        "the copy inside the weights is read",
        stacklevel=3,
    )
    return json.loads(text)


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

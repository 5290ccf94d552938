"""Save and load trained drafters: model.safetensors and config.json in one folder.

A save is whole or absent: it is written beside its place and takes it in one step. A load is
exact: a missing tensor, an unused one, an unknown field or another target is an error.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters.base import Drafter, NeuralDrafter
from drafters.errors import UserError
from drafters.fingerprint import Fingerprint
from drafters.formats.registry import refuse_foreign
from drafters.hub import fetch, is_hub_id
from drafters.registry import causal_lm_family, joined, method
from drafters.stored import (
    CONFIG,
    FORMAT_VERSION,
    WEIGHTS,
    StoredDrafter,
    check_causal_lm,
    read_config,
)
from drafters.target import Target
from drafters.whole import whole_folder


def save_drafter(
    drafter: NeuralDrafter,
    folder: str | Path,
    target: Target,
    training: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    beside: Callable[[Path], None] | None = None,
) -> Path:
    """Write a drafter's folder in place of what stood there.

    Args:
        drafter: its own tensors are saved.
        folder: where; parents are made.
        target: whose fingerprint is stored.
        training: how it came about (settings, measured figures): stored, never read back.
        dtype: of the saved parameters; None: as they are.
        beside: writes into the folder what belongs to the drafter, before it takes its place.
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
    return write_folder(folder, {"format_version": FORMAT_VERSION, **config}, tensors, beside)


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    beside: Callable[[Path], None] | None = None,
) -> Path:
    """Write config, weights and what belongs beside them in place of what stood there.

    All of it or nothing.

    Raises:
        UserError: if the disk does not take them.
    """
    with whole_folder(folder) as new:
        save_file(dict(tensors), new / WEIGHTS, metadata={"format": "pt"})
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if beside is not None:
            beside(new)
    return Path(folder)


def load_drafter(spec: str | Path, target: Target | None = None) -> Drafter:
    """Load a drafter from its folder, or make one of a family without weights by name.

    Args:
        spec: a folder written by save_drafter, a Hugging Face causal LM's folder (a standalone
            draft model), OWNER/NAME[@REVISION] on the hub, or the name of a family without weights,
            or with weights that the target itself may ship; several, joined by +, draft together.
            Only the hub's asks a network.
        target: refuse the drafter if it was made for another target; None: no check.

    Raises:
        UserError: says what is missing, unused, unknown or different.
    """
    if not isinstance(spec, str | os.PathLike):
        raise UserError(f"drafter is {spec!r}: give a folder or a name")
    if not isinstance(target, Target | None):
        raise UserError(f"target is {target!r}: give what Target.load made")
    folder, parts = Path(spec), parts_of(str(spec))
    if len(parts) > 1:
        return joined([load_drafter(part, target) for part in parts])
    if not folder.is_dir():
        if not is_hub_id(spec):
            return _without_weights(str(spec), target)
        folder = fetch(str(spec))
    if "drafter" not in read_config(folder):
        refuse_foreign(folder)
        check_causal_lm(folder)
        return causal_lm_family().load(folder, target)
    stored = StoredDrafter.read(folder)
    if target is not None:
        check_target(stored, target)
    return stored.load()


def check_target(stored: StoredDrafter, target: Target) -> None:
    """Refuse a drafter that was made for another target; warn of another conversion of its model.

    Raises:
        UserError: names the first difference.
    """
    made_for, here = stored.made_for, Fingerprint.of(target)
    found = made_for.difference(here)
    if found is None:
        return
    field, theirs, ours = found
    if field in ("weights", "quantisation") and made_for.same_model(here):
        how = f"quantised ({here.quantisation})" if here.quantisation else "another conversion"
        warnings.warn(
            f"{stored.folder} was made for {made_for.name}; {target.name} is {how} of the same "
            "model, so acceptance may differ a little",
            stacklevel=3,
        )
        return
    raise UserError(
        f"{stored.folder} was made for another target ({made_for.name}): its {field} is {theirs}, "
        f"{target.name} has {ours}; give the target it was trained on, or train one for this"
    )


def parts_of(spec: str) -> list[str]:
    """Return the drafters that a + joins; a folder whose name has one is one drafter.

    >>> parts_of("name+runs/folder")
    ['name', 'runs/folder']

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

"""Stored: what a drafter's folder holds, read without trusting it.

A folder is somebody else's: nothing in it is run, no path in it is followed, and its sizes are
compared with its tensors before memory is taken for them. Weights are safetensors; a pickle can run
code when it is read, so it is refused with the way to convert it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from drafters.base import NeuralDrafter
from drafters.errors import UserError
from drafters.fingerprint import Fingerprint
from drafters.registry import method
from drafters.shape import TargetShape
from drafters.untrusted import INDEX, read_index, read_object, refuse_devices, refuse_pickles

FORMAT_VERSION = 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"
_FIELDS = {"format_version", "drafter", "options", "shape", "target", "training"}
_LARGEST = 2**24  # a size or count in a config, unless the file holds more values than that
_SPARE = 64  # parameters a family may make on its way and replace


@dataclass(frozen=True)
class StoredDrafter:
    """A folder that save_drafter wrote; its weights are still on disk.

    Args:
        folder: where it is.
        family: of the drafter.
        options: resolved.
        shape: of the target it was made for.
        made_for: that target.
        training: how it came about, as training stored it.
    """

    folder: Path
    family: str
    options: Mapping[str, Any]
    shape: TargetShape
    made_for: Fingerprint
    training: Mapping[str, Any]

    @classmethod
    def read(cls, folder: str | Path) -> "StoredDrafter":
        """Read a folder's config.

        Raises:
            UserError: if it is not one that this version wrote.
        """
        place = Path(folder)
        config = read_config(place)
        if "drafter" not in config:
            raise UserError(f"{place}: config.json names no drafter: give a folder training wrote")
        try:
            return cls(
                place,
                str(config["drafter"]),
                dict(config["options"]),
                TargetShape(**config["shape"]),
                Fingerprint(**config["target"]),
                dict(config["training"]),
            )
        except (TypeError, ValueError) as error:
            raise UserError(f"{place}: config.json is damaged ({error})") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor; see header."""
        return {name: shape for name, (shape, _) in self.header().items()}

    def header(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and kind of every tensor, from the header of the file alone.

        Raises:
            UserError: if there are no readable safetensors.
        """
        path = self.folder / WEIGHTS
        if not path.exists():
            refuse_pickles(self.folder, WEIGHTS)
        try:
            with safe_open(path, "pt") as file:
                parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                return {n: (tuple(x.get_shape()), x.get_dtype()) for n, x in parts.items()}
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path} cannot be read ({error}): only whole safetensors are read, copy it again"
            ) from error

    def faults(self) -> list[str]:
        """Say which tensors are missing, unused or of another shape than the config asks for.

        No memory is taken for weights: the config's sizes are tried without any.

        Raises:
            UserError: if the config's options cannot be.
        """
        header = self.header()
        found = {name: shape for name, (shape, _) in header.items()}
        self._check_numbers(max(_LARGEST, sum(map(math.prod, found.values()))))
        with torch.device("meta"), _at_most(4 * len(found) + _SPARE, self.folder):
            empty = self._build()
        state = empty.state_dict()
        wanted = {name: tuple(t.shape) for name, t in state.items()}
        missing, unused = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
        faults = [f"missing tensors {missing}, unused tensors {unused}"] * bool(missing or unused)
        both = [name for name in wanted if name in found]
        return (
            faults
            + [
                f"{name} is {found[name]}, the config asks for {wanted[name]}"
                for name in both
                if found[name] != wanted[name]
            ]
            + [
                f"{name} holds {header[name][1]}, the config asks for {state[name].dtype}"
                for name in both
                if state[name].is_floating_point() != ("F" in header[name][1])
            ]
        )

    def tensors(self) -> dict[str, Tensor]:
        """Read the weights."""
        return load_file(self.folder / WEIGHTS)

    def load(self) -> NeuralDrafter:
        """Make the drafter with exactly these weights.

        Raises:
            UserError: names the tensor or the option that is wrong.
        """
        faults = self.faults()
        if faults:
            raise UserError(f"{self.folder / WEIGHTS}: {'; '.join(faults)}")
        drafter = self._build()
        drafter.load_state_dict(self.tensors())
        return drafter.eval()

    def _check_numbers(self, limit: int) -> None:
        """Refuse sizes that no tensor of the file could have, before anything is made of them."""
        for name, value in _numbers({**self.shape.to_dict(), **self.options}):
            if abs(value) > limit:
                raise UserError(f"{self.folder}: config.json has {name} = {value}: at most {limit}")

    def _build(self) -> NeuralDrafter:
        family = method(self.family)
        if not issubclass(family, NeuralDrafter):
            raise UserError(f"{self.folder}: {self.family} has no weights to load")
        return family.rebuild(self.options, self.shape)


def read_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json: ours with exactly its fields, or a causal LM's.

    Raises:
        UserError: if it cannot be read, or another version wrote it.
    """
    if not (folder / CONFIG).is_file():
        best = folder / "best"  # what a run's folder holds
        meant = best if (best / CONFIG).is_file() else "a drafter's folder, as a run wrote it"
        raise UserError(f"{folder} holds no {CONFIG}: give {meant}")
    refuse_devices(folder)
    config = read_object(folder / CONFIG)
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


def check_causal_lm(folder: Path) -> None:
    """Refuse a causal LM's folder that would run code or reads files outside itself.

    Raises:
        UserError: pickled weights without safetensors, or an index that leads elsewhere.
    """
    if not any(folder.glob("*.safetensors")):
        refuse_pickles(folder, WEIGHTS)
    if (folder / INDEX).exists():
        read_index(folder)


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield every whole number in nested plain values with the name above it."""
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, object]", value).items():
            yield from _numbers(inner, key)
    elif isinstance(value, list | tuple):
        for inner in cast("Sequence[object]", value):
            yield from _numbers(inner, name)
    elif isinstance(value, int):
        yield name, value


@contextmanager
def _at_most(count: int, folder: Path) -> Iterator[None]:
    """Stop a family from making more parameters than a file can fill."""
    made = 0

    def counted(_module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        nonlocal made
        made += 1
        if made > count:
            raise UserError(f"{folder}: config.json asks for far more tensors than {WEIGHTS} holds")

    handle = register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()

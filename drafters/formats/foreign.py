"""Foreign: a folder that somebody else wrote, read without trusting it.

Only JSON and safetensors are opened, only inside the folder, and no tensor is read before its shape
has been compared with what the config asks for. Pickles are refused: reading one may run code.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.errors import UserError
from drafters.untrusted import INDEX, pickles_in, read_index, read_object

CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors")
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of one tensor before it is read."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


@dataclass(frozen=True)
class Foreign:
    """A foreign drafter's folder.

    Args:
        folder: where it is.
        config: of its config.json.
        headers: its tensors by name; none of them is read yet.
    """

    folder: Path
    config: Mapping[str, Any]
    headers: Mapping[str, Header]

    @classmethod
    def read(cls, folder: str | Path) -> "Foreign":
        """Read config and headers.

        Raises:
            UserError: no config, no safetensors, a pickle, or a file outside the folder.
        """
        place = Path(folder)
        if not place.is_dir():
            raise UserError(f"{place}: no such folder; give the one of a drafter's files")
        config = read_object(place / CONFIG)
        headers: dict[str, Header] = {}
        for file in _weights(place):
            headers.update(_headers(file))
        return cls(place, config, headers)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape.

        Raises:
            UserError: if there is no such tensor.
        """
        if name not in self.headers:
            raise UserError(f"{self.folder}: tensor {name} is missing")
        return self.headers[name].shape

    def matrix(self, name: str) -> tuple[int, int]:
        """Return rows and columns of a tensor.

        Raises:
            UserError: if there is no such tensor, or it is no matrix.
        """
        shape = self.shape(name)
        if len(shape) != 2:
            raise UserError(f"{self.folder}: {name} is {list(shape)}, not a matrix")
        return shape[0], shape[1]

    def section(self, name: str) -> dict[str, Any]:
        """Return an object inside the config, empty if it is absent.

        Raises:
            UserError: if it is something else.
        """
        section = self.config.get(name)
        if not isinstance(section, dict | None):
            raise UserError(f"{self.folder}: {name} in config.json is {section!r}, not an object")
        return section or {}

    def has(self, *names: str) -> bool:
        """Return whether it has all of these tensors."""
        return all(name in self.headers for name in names)

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors.

        Raises:
            UserError: if one is neither a plain float nor whole numbers, or holds NaN or infinity.
        """
        tensors: dict[str, Tensor] = {}
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.headers[name].file, []).append(name)
        for file, wanted in by_file.items():
            with safe_open(file, "pt") as source:
                for name in wanted:
                    tensors[name] = self._sound(name, source.get_tensor(name))
        return tensors

    def _sound(self, name: str, tensor: Tensor) -> Tensor:
        if self.headers[name].dtype not in _FLOATS | {"I64", "I32", "BOOL"}:
            raise UserError(
                f"{self.folder}: {name} is {self.headers[name].dtype}: give weights in float32, "
                "float16 or bfloat16, not quantised ones"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{self.folder}: {name} holds NaN or infinite numbers")
        return tensor


def _weights(folder: Path) -> list[Path]:
    """Return the weight files: plain names inside the folder only."""
    if (folder / INDEX).is_file():
        return sorted(set(read_index(folder).values()))
    found = [folder / name for name in _WEIGHTS if (folder / name).is_file()]
    if found:
        return found[:1]
    pickles = pickles_in(folder)
    if pickles:
        raise UserError(
            f"{folder}: {pickles[0]} is a pickle, and reading one may run code: convert it to "
            "safetensors where nothing can be harmed, with the command under 'Pickles' in "
            "docs/formats.md"
        )
    raise UserError(f"{folder}: no weights: give a folder with {' or '.join(_WEIGHTS)}")


def _headers(file: Path) -> dict[str, Header]:
    try:
        with safe_open(file, "pt") as source:
            slices = {name: source.get_slice(name) for name in source.keys()}  # noqa: SIM118
            return {
                name: Header(tuple(x.get_shape()), str(x.get_dtype()), file)
                for name, x in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{file} cannot be read ({error}): only whole safetensors are read, copy it again"
        ) from error

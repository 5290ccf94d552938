"""Files of other people's folders: JSON of a bounded size, shards inside the folder, no pickles."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from drafters.errors import UserError

INDEX = "model.safetensors.index.json"
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
LARGEST = 2**53  # of a given number: up to it JSON holds every whole number exactly
_LARGEST_FILE = 16 * 2**20  # bytes of JSON: ours have a few thousand, an index of shards millions


def is_too_large(value: object) -> bool:
    """Tell whether a value is a number that JSON cannot hold exactly, or NaN."""
    return isinstance(value, int | float) and not abs(value) <= LARGEST


def read_json(file: Path, most: int = _LARGEST_FILE) -> Any:
    """Read JSON of at most so many bytes, whatever a device that never ends says of its size.

    Raises:
        UserError: if it is larger, cannot be read, or is no JSON.
    """
    try:
        with file.open("rb") as stream:
            text = stream.read(most + 1)
        if len(text) > most:
            raise UserError(f"{file} has more than {most} bytes: not a file of this kind")
        return json.loads(text.decode())
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read ({error})") from error


def lines_of(file: Path) -> Iterator[str]:
    """Yield the lines of a text, ends of lines included.

    Raises:
        UserError: if one is too long to be a line.
        OSError, UnicodeDecodeError: if it cannot be read.
    """
    with file.open(encoding="utf-8") as stream:
        while line := stream.readline(_LARGEST_FILE + 1):
            if len(line) > _LARGEST_FILE:
                raise UserError(f"{file} has a line of more than {_LARGEST_FILE} characters")
            yield line


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: if it cannot be read, is too large to be one, or holds something else.
    """
    found = read_json(file)
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no object")
    return cast("dict[str, Any]", found)


def read_index(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor that a folder's index names.

    Raises:
        UserError: if it names anything but safetensors files in the folder itself.
    """
    table = read_object(folder / INDEX).get("weight_map")
    names = cast("dict[str, Any]", table) if isinstance(table, dict) else {}
    for name in names.values():
        plain = isinstance(name, str) and Path(name).name == name
        if not plain or not name.endswith(".safetensors"):
            raise UserError(
                f"{folder}: {INDEX} names {name!r}, which is not a file in the folder: only "
                "safetensors files inside the folder are read"
            )
    return {tensor: folder / name for tensor, name in names.items()}


def refuse_devices(folder: Path) -> None:
    """Refuse a folder with anything but files and folders: reading it may never end.

    Raises:
        UserError: names the device, pipe or socket, links to one among them; or it cannot be read.
    """
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror})") from error
    for file in files:
        if file.exists() and not file.is_file() and not file.is_dir():
            raise UserError(f"{file} is a device or a pipe: give a folder of files")


def pickles_in(folder: Path) -> list[str]:
    """Return the names of a folder's pickles."""
    return sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)


def refuse_pickles(folder: Path, weights: str) -> None:
    """Refuse a folder whose weights are pickles.

    Args:
        folder: looked through.
        weights: the file of safetensors that it should hold.

    Raises:
        UserError: names the pickle and how to convert it where it can do no harm.
    """
    pickles = pickles_in(folder)
    if pickles:
        raise UserError(
            f"{folder}: its weights are a pickle ({pickles[0]}), which can run code when it is "
            "read: convert it where it can do no harm (a container without network or your files) "
            'with python -c "import torch, safetensors.torch as s; '
            f"s.save_file(torch.load('{pickles[0]}', weights_only=True), '{weights}')\", and keep "
            f"{weights} only"
        )

"""Rows: what files and data sets hold, before anybody asks what it means.

JSON and JSONL are read as they are written; Parquet and Arrow files, folders that `datasets` saved
and data sets of the hub come through Arrow, which gives every object the keys of all others: what
is empty there was not given. The hub is asked only by name (`hub:owner/name`).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from drafters.errors import UserError
from drafters.settings import own

HUB = "hub:"
SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json")
_SAVED = "dataset_info.json"  # lies in a folder that `datasets` saved

# Where a row is from, what it is called unless it says, and its values.
Row = tuple[str, str, Mapping[str, Any]]


def read_rows(path: str, split: str = "train") -> Iterator[Row]:
    """Read every row of a source.

    Args:
        path: a file, a folder of files, a folder that `datasets` saved, or hub:owner/name.
        split: which part of a data set of the hub, or of a saved one that has parts.

    Raises:
        UserError: nothing is there, or a line is malformed; names the file and the line.
    """
    if path.startswith(HUB):
        yield from _dataset_rows(path, _from_hub(path.removeprefix(HUB), split))
        return
    place = own(path)
    if any((place / name).exists() for name in (_SAVED, "dataset_dict.json")):
        yield from _dataset_rows(path, _from_disk(place, split))
        return
    for file in _files(place):
        lines = _json_lines(file) if file.suffix in (".json", ".jsonl") else _arrow_lines(file)
        for line, row in lines:
            yield f"{file} line {line}", f"{file.stem}-{line}", row


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(
            f"data.path {path}: no such file or folder; give chats as {', '.join(SUFFIXES)}, or "
            f"{HUB}OWNER/NAME for a data set of the hub"
        )
    known = [f for f in path.iterdir() if f.suffix in SUFFIXES] if path.is_dir() else [path]
    # a manifest describes the chats beside it
    files = sorted(f for f in known if f.name != "manifest.json")
    if not files:
        raise UserError(f"data.path {path}: no {' or '.join(SUFFIXES)} file in this folder")
    if files[0].suffix not in SUFFIXES:
        raise UserError(f"data.path {path}: give a {' or '.join(SUFFIXES)} file, or their folder")
    for file in files:
        if not file.is_file():  # a device never ends
            raise UserError(f"data.path {file} is no file: give {' or '.join(SUFFIXES)} files")
    return files


def _from_hub(name: str, split: str) -> Any:
    import datasets

    loader: Any = datasets.load_dataset
    try:
        return loader(name, split=split)
    except Exception as error:  # whatever a client of a network may raise
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"data.path {HUB}{name}, split {split}: {reason}; give the name of a data set that can "
            "be reached, or a file"
        ) from error


def _from_disk(path: Path, split: str) -> Any:
    import datasets

    found: Any = datasets.load_from_disk(str(path))
    if isinstance(found, datasets.DatasetDict):
        parts = cast("Mapping[str, Any]", found)
        if split not in parts:
            raise UserError(f"{path} has no split {split!r}: give data.split as {', '.join(parts)}")
        return parts[split]
    return found


def _dataset_rows(name: str, dataset: Any) -> Iterator[Row]:
    for number, row in enumerate(dataset, start=1):
        yield f"{name} row {number}", f"row-{number}", cast("Mapping[str, Any]", _given(row))


def _json_lines(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as UTF-8 text ({error})") from error
    if file.suffix == ".json" and text.lstrip().startswith("["):
        try:
            rows = list(enumerate(json.loads(text), start=1))
        except json.JSONDecodeError as error:
            raise UserError(f"{file} line {error.lineno}: not valid JSON ({error.msg})") from error
        except (RecursionError, ValueError) as error:  # a number of thousands of digits
            raise UserError(f"{file}: not chats ({error})") from error
    else:
        rows = _parsed_lines(file, text)
    for line, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{file} line {line}: not an object with ids or messages")
        yield line, cast("dict[str, Any]", row)


def _parsed_lines(file: Path, text: str) -> Iterator[tuple[int, Any]]:
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            yield line, json.loads(content)
        except json.JSONDecodeError as error:
            raise UserError(f"{file} line {line}: not valid JSON ({error.msg})") from error
        except (RecursionError, ValueError) as error:
            raise UserError(f"{file} line {line}: not a chat ({error})") from error


def _arrow_lines(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    line = 0
    try:
        for batch in _batches(file):
            names: list[str] = batch.schema.names
            values = [_column(batch.column(name)) for name in names]
            for row in range(batch.num_rows):
                line += 1
                pairs = zip(names, values, strict=True)
                yield line, {name: column[row] for name, column in pairs}
    except (OSError, pa.ArrowException) as error:
        kind = file.suffix[1:].capitalize()
        reason = str(error).splitlines()[0]
        raise UserError(f"{file}: not readable as {kind} ({reason})") from error


def _batches(file: Path) -> Iterator[Any]:
    if file.suffix == ".parquet":
        yield from pq.ParquetFile(file).iter_batches()
        return
    with pa.memory_map(str(file)) as source:
        try:
            yield from pa.ipc.open_stream(source)  # what `datasets` writes
        except pa.ArrowInvalid:
            table = pa.ipc.open_file(source)
            yield from (table.get_batch(i) for i in range(table.num_record_batches))


def _column(column: Any) -> list[Any]:
    """Return a column's values; lists of numbers as arrays over one buffer."""
    kind = column.type
    numeric = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not numeric or not _flat(kind.value_type):
        return [_given(value) for value in column.to_pylist()]
    flat = column.flatten().to_numpy(zero_copy_only=False)
    lengths = column.value_lengths().fill_null(0).to_numpy()
    parts = np.split(flat, np.cumsum(lengths)[:-1])
    valid = column.is_valid().to_pylist()
    return [part if ok else None for part, ok in zip(parts, valid, strict=True)]


def _flat(kind: Any) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_boolean(kind)


def _given(value: Any) -> Any:
    """Return a value without the empty keys that Arrow adds to objects."""
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value)
        return {key: _given(inner) for key, inner in pairs.items() if inner is not None}
    if isinstance(value, list):
        return [_given(inner) for inner in cast("list[Any]", value)]
    return value

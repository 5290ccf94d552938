"""Records: chats as files hold them, before any model is loaded.

Parquet as scripts/make_chats.py writes it (ids with their label mask), Parquet or JSONL with
messages, one file or a folder of them. Whatever is malformed is named with its file and line.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from drafters.errors import UserError

SUFFIXES = (".parquet", ".jsonl")
MANIFEST = "manifest.json"
_COLUMNS = ("id", "ids", "label_mask", "messages", "finish_reason")


@dataclass(frozen=True)
class Record:
    """One chat of a file.

    Args:
        where: file and line, for messages to the user.
        id: the chat's name; decides whether it is held out.
        ids: [n] the very ids that were generated; None: to be rendered from `messages`.
        label_mask: [n] bool, True for the tokens of answers; None with messages.
        messages: roles and contents, unchecked; None with ids.
        cut: whether the last answer was ended by a length limit.
    """

    where: str
    id: str
    ids: np.ndarray | None = None
    label_mask: np.ndarray | None = None
    messages: object = None
    cut: bool = False


def read_records(path: str | Path) -> list[Record]:
    """Read every chat of a file, or of all Parquet and JSONL files of a folder.

    Raises:
        UserError: nothing is there, or a line is malformed; names the file and the line.
    """
    records = [record for file in _files(Path(path)) for record in _read(file)]
    if not records:
        raise UserError(f"{path}: no chats in it; make some with scripts/make_chats.py")
    return records


def writer_of(path: str | Path) -> dict[str, Any] | None:
    """Return the fingerprint of the target that wrote the chats, as their manifest has it.

    None: there is no manifest of scripts/make_chats.py beside them.
    """
    folder = Path(path)
    manifest = (folder if folder.is_dir() else folder.parent) / MANIFEST
    try:
        return json.loads(manifest.read_text(encoding="utf-8"))["settings"]["target"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"data.path {path}: no such file or folder; give chats as Parquet or JSONL")
    files = sorted(f for f in path.iterdir() if f.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise UserError(f"data.path {path}: no {' or '.join(SUFFIXES)} file in this folder")
    if files[0].suffix not in SUFFIXES:
        raise UserError(f"data.path {path}: give a {' or '.join(SUFFIXES)} file, or their folder")
    return files


def _read(file: Path) -> Iterator[Record]:
    rows = _parquet_rows(file) if file.suffix == ".parquet" else _jsonl_rows(file)
    for line, row in rows:
        yield _record(f"{file} line {line}", f"{file.stem}-{line}", row)


def _jsonl_rows(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as UTF-8 text ({error})") from error
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except json.JSONDecodeError as error:
            raise UserError(f"{file} line {line}: not valid JSON ({error.msg})") from error
        if not isinstance(row, dict):
            raise UserError(f"{file} line {line}: not an object with ids or messages")
        yield line, row


def _parquet_rows(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        source = pq.ParquetFile(file)
        columns = [name for name in _COLUMNS if name in source.schema_arrow.names]
        line = 0
        for batch in source.iter_batches(columns=columns):
            values = {name: _column(batch.column(name)) for name in columns}
            for row in range(batch.num_rows):
                line += 1
                yield line, {name: column[row] for name, column in values.items()}
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{file}: not readable as Parquet ({reason})") from error


def _column(column: pa.Array) -> list[Any]:
    """Return a column's values; lists of numbers as arrays over one buffer."""
    kind = column.type
    numeric = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not numeric or not _flat(kind.value_type):
        return column.to_pylist()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    lengths = column.value_lengths().fill_null(0).to_numpy()
    parts = np.split(flat, np.cumsum(lengths)[:-1])
    valid = column.is_valid().to_pylist()
    return [part if ok else None for part, ok in zip(parts, valid, strict=True)]


def _flat(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_boolean(kind)


def _record(where: str, name: str, row: Mapping[str, Any]) -> Record:
    identity = str(row.get("id") or name)
    cut = row.get("finish_reason") == "length"
    if row.get("ids") is None:
        if row.get("messages") is None:
            known = ", ".join(sorted(row)) or "nothing"
            raise UserError(f"{where}: neither ids nor messages (it has {known})")
        return Record(where, identity, messages=row["messages"], cut=cut)
    if row.get("label_mask") is None:
        raise UserError(f"{where}: ids without label_mask; give both, or messages")
    ids = _array(where, "ids", row["ids"], np.integer)
    mask = _array(where, "label_mask", row["label_mask"], np.bool_)
    if len(ids) != len(mask):
        raise UserError(f"{where}: {len(ids)} ids but {len(mask)} entries of label_mask")
    return Record(where, identity, ids, mask, cut=cut)


def _array(where: str, name: str, values: object, kind: type) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or not np.issubdtype(array.dtype, kind):
        wanted = "whole numbers" if kind is np.integer else "true and false"
        raise UserError(f"{where}: {name} is not a list of {wanted}")
    return array

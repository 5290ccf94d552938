"""Records: chats of a source, before any model is loaded.

Chats as scripts/make_chats.py writes them (ids with their label mask), or in one of the shapes that
training/dialects.py knows. Whatever is malformed is named with its file and line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from drafters.errors import UserError
from drafters.settings import own
from drafters.untrusted import read_object
from training.dialects import SHAPES, messages_of, tools_of
from training.messages import Refused
from training.rows import HUB, read_rows

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Record:
    """One chat of a source.

    Args:
        where: file and line, for messages to the user.
        id: the chat's name; decides whether it is held out.
        ids: [n] the very ids that were generated; None: to be rendered.
        label_mask: [n] bool, True for the tokens of answers; None without ids.
        messages: roles and contents, unchecked; None with ids or text.
        tools: what the template is given as tools.
        text: in the template's form already; None with ids or messages.
        cut: whether the last answer was ended by a length limit.
        refused: why it cannot be used, known from its shape alone.
    """

    where: str
    id: str
    ids: np.ndarray | None = None
    label_mask: np.ndarray | None = None
    messages: object = None
    tools: object = None
    text: str | None = None
    cut: bool = False
    refused: str | None = None


def read_records(path: str | Path, split: str = "train") -> list[Record]:
    """Read every chat of a source; see read_rows.

    Raises:
        UserError: nothing is there, or a line is malformed; names the file and the line.
    """
    records = [_record(where, name, row) for where, name, row in read_rows(str(path), split)]
    if not records:
        raise UserError(f"{path}: no chats in it; make some with scripts/make_chats.py")
    return records


def writer_of(path: str | Path) -> dict[str, Any] | None:
    """Return the fingerprint of the target that wrote the chats, as their manifest has it.

    None: there is no manifest of scripts/make_chats.py beside them.
    """
    target = _made_by(path).get("target")
    return cast("dict[str, Any]", target) if isinstance(target, dict) else None


def template_options_of(path: str | Path) -> dict[str, Any] | None:
    """Return what the template was given when the chats were written; None: not known."""
    sampling = _made_by(path).get("sampling")
    found = cast("dict[str, Any]", sampling) if isinstance(sampling, dict) else {}
    options = found.get("template_options")
    return cast("dict[str, Any]", options) if isinstance(options, dict) else None


def _made_by(path: str | Path) -> dict[str, Any]:
    if str(path).startswith(HUB):
        return {}
    folder = own(path)
    manifest = (folder if folder.is_dir() else folder.parent) / MANIFEST
    try:
        settings = read_object(manifest).get("settings")
    except UserError:
        return {}
    return cast("dict[str, Any]", settings) if isinstance(settings, dict) else {}


def _record(where: str, name: str, row: Mapping[str, Any]) -> Record:
    identity = str(row.get("id") or name)
    cut = row.get("finish_reason") == "length"
    if row.get("ids") is not None:
        return _written(where, identity, row, cut=cut)
    try:
        messages, tools = messages_of(row), tools_of(row)
    except Refused as reason:
        return Record(where, identity, cut=cut, refused=str(reason))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: tools are not valid JSON ({error})") from error
    if messages is not None:
        return Record(where, identity, messages=messages, tools=tools, cut=cut)
    if isinstance(row.get("text"), str):
        return Record(where, identity, text=row["text"], cut=cut)
    known = ", ".join(sorted(row)) or "nothing"
    raise UserError(f"{where}: no chat in it (it has {known}): give {SHAPES}")


def _written(where: str, name: str, row: Mapping[str, Any], *, cut: bool) -> Record:
    """Return a chat that is given by the ids that were read and written."""
    if row.get("label_mask") is None:
        raise UserError(f"{where}: ids without label_mask; give both, or messages")
    ids = _array(where, "ids", row["ids"], np.integer)
    mask = _array(where, "label_mask", row["label_mask"], np.bool_)
    if len(ids) != len(mask):
        raise UserError(f"{where}: {len(ids)} ids but {len(mask)} entries of label_mask")
    return Record(where, name, ids, mask, cut=cut)


def _array(where: str, name: str, values: object, kind: type) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of several lengths within it
        array = np.empty((0, 0))
    if array.ndim != 1 or not np.issubdtype(array.dtype, kind):
        wanted = "whole numbers" if kind is np.integer else "true and false"
        raise UserError(f"{where}: {name} is not a list of {wanted}")
    return array

"""Dialects: the common shapes of chat data, each turned into messages or a text.

messages (role, content and what else a message has), ShareGPT (from, value), a prompt with its
response, and text that is in the template's form already. Nothing is guessed: a row of no known
shape is an error, a speaker of no known role is a reason to leave the chat out.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

from training.messages import Refused

_LISTS = ("messages", "conversations", "conversation")
_PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("prompt", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
)
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
SHAPES = "ids with label_mask, messages, conversations, prompt with response, or text"


def messages_of(row: Mapping[str, Any]) -> object:
    """Return a row's messages, unchecked; None if it has none.

    Raises:
        Refused: a speaker has no known role.
    """
    for key in _LISTS:
        if row.get(key) is not None:
            return _parsed(row[key])
    for asked, answered in _PAIRS:
        if row.get(asked) is not None and row.get(answered) is not None:
            return _pair(row, row[asked], row[answered])
    return None


def tools_of(row: Mapping[str, Any]) -> object:
    """Return what a row offers as tools (a list, or JSON of one); None if nothing."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = json.loads(tools) if tools.strip() else None
    return tools or None


def _parsed(value: object) -> object:
    """Return messages with `from` and `value` named as templates name them."""
    if not isinstance(value, list):
        return value
    entries = cast("list[object]", value)
    return [_renamed(cast("dict[str, Any]", x)) if isinstance(x, dict) else x for x in entries]


def _renamed(message: dict[str, Any]) -> dict[str, Any]:
    if "from" not in message or "role" in message:
        return message
    speaker = str(message["from"]).lower()
    if speaker not in _SPEAKERS:
        raise Refused(f"with a message from {speaker!r}")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": _SPEAKERS[speaker], "content": message.get("value"), **rest}


def _pair(row: Mapping[str, Any], asked: object, answered: object) -> object:
    """Return a prompt and its answer as messages; both may be messages already."""
    before = _side("user", asked)
    if isinstance(asked, str):
        if row.get("input"):  # of instruction data: what the instruction is about
            before = _side("user", f"{asked}\n\n{row['input']}")
        if row.get("system"):
            before = [*_side("system", row["system"]), *before]
    return _parsed([*before, *_side("assistant", answered)])


def _side(role: str, value: object) -> list[object]:
    if isinstance(value, list):
        return cast("list[object]", value)
    return [{"role": role, "content": value}]

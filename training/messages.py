"""Messages of a chat: what they may hold, checked before a template sees them."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

Message = dict[str, Any]

_ROLES = ("system", "user", "assistant", "tool")
_ESSENTIAL = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # parts of an answer
_BESIDE = ("name", "tool_call_id")  # a template may show them or not


class Refused(Exception):  # noqa: N818 - an answer about one chat, not a failure
    """A chat that cannot be rendered faithfully, and why."""


class Unstable(Refused):
    """A chat whose answers the template renders otherwise than they were given."""


def checked(messages: object) -> list[Message]:
    """Return messages as templates take them: role, content, and what an answer has beside it.

    Raises:
        Refused: there is something in them that templates treat in ways that cannot be checked.
    """
    if not isinstance(messages, list) or not messages:
        raise Refused("without a list of messages")
    return [_checked(message) for message in cast("list[object]", messages)]


def whole(text: str) -> str:
    """Return a text of characters, as tokenizers read it.

    Raises:
        Refused: JSON can hold halves of surrogate pairs, which are none.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused("with half a character") from None
    return text


def essential(message: Mapping[str, Any]) -> Iterator[str]:
    """Name what a message holds that must not be left out, beside role and content."""
    yield from (name for name in _ESSENTIAL if name in message)


def _checked(message: object) -> Message:
    if not isinstance(message, dict):
        raise Refused("with a message that is not an object with role and content")
    given = cast("Message", message)
    role = given.get("role")
    if role not in _ROLES:
        raise Refused(f"with a message of the role {role!r}")
    rest = {k: v for k, v in given.items() if k not in ("role", "content") and v}
    own = _ESSENTIAL if role == "assistant" else ()
    unknown = sorted(set(rest) - {*own, *_BESIDE})
    if unknown:
        raise Refused(f"with a message that has {', '.join(unknown)} beside role and content")
    content = given.get("content")
    if content is None and "tool_calls" in rest:
        content = ""
    return {"role": role, "content": _text(content), **rest}


def _text(content: object) -> str:
    """Return a content's text; a list of text parts is joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [cast("Message", x) for x in cast("list[object]", content) if isinstance(x, dict)]
        texts = [x.get("text") for x in parts if x.get("type", "text") == "text"]
        if len(texts) == len(cast("list[object]", content)) and all(
            isinstance(x, str) for x in texts
        ):
            return "".join(cast("list[str]", texts))
    raise Refused("with a message whose content is not text")

"""Keys: what tells that a chat asks what another one asks, or is the same."""

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from training.conversation import Conversation
from training.sources import SELF_CHAT


def row_keys(row: Mapping[str, Any], kind: str) -> list[str]:
    """Return the keys of a stored chat, those that it had when it was made.

    Args:
        row: as SCHEMA has them (training/shards.py).
        kind: of the source it came from.
    """
    asked = [m["content"] for m in row["messages"] if m["role"] == "user"]
    return [_text_key("\n".join(asked[: 1 if kind == SELF_CHAT else None])), digest(row["ids"])]


def question_key(chat: Conversation) -> str:
    """Return a key of what is asked: given messages, or the first one; case and marks apart."""
    return _text_key("\n".join(chat.start.given) or chat.messages[0]["content"])


def _text_key(text: str) -> str:
    words = re.findall(r"\w+", text.lower())
    return digest(" ".join(words) or text.strip())


def digest(value: object) -> str:
    """Return a short digest of a value's representation."""
    return blake2b(repr(value).encode(), digest_size=8).hexdigest()

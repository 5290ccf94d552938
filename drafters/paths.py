"""Paths: what is published tells none of this machine; of an absolute one the last part stays."""

import re
from collections.abc import Mapping
from typing import Any, cast

# begins a text, or stands behind a space or what parts a drafter's spec or an option; no URL's
_ABSOLUTE = re.compile(r"""(?<![^\s+=:,"'(\[{])/(?!/)(?:[^\s/+:,"')\]}]+/+)*([^\s/+:,"')\]}]+)/*""")


def without_paths(value: Any) -> Any:
    """Return what is published: of every absolute path in it the last part stays.

    >>> without_paths({"target": "/home/me/small", "at": ["owner/name", "runs/x", "1/T(1)"]})
    {'target': 'small', 'at': ['owner/name', 'runs/x', '1/T(1)']}
    >>> without_paths("--drafter ngram+/home/me/a:growth=chain --chats=/data/b https://h.org/a/b")
    '--drafter ngram+a:growth=chain --chats=b https://h.org/a/b'
    """
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value)
        return {key: without_paths(inner) for key, inner in pairs.items()}
    if isinstance(value, list | tuple):
        return [without_paths(inner) for inner in cast("list[Any]", value)]
    if isinstance(value, str):
        return _ABSOLUTE.sub(r"\1", value)
    return value

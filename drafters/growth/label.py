"""Label: what tables and cards call a shape."""

from collections.abc import Mapping, Sequence
from typing import TypeGuard


def shape_label(growth: str, shape: Mapping[str, object], nodes: int | None = None) -> str:
    """Return a shape in a few characters: its sizes, or how many nodes a searched tree has.

    Args:
        growth: name of the policy.
        shape: its options; how drafts are chosen is left out.
        nodes: drafted a round; counted from the paths of a tree where nobody knows.

    >>> shape_label("dynamic", {"nodes": 8, "width": 3, "depth": 4})
    'dynamic 8/3/4'
    >>> shape_label("static", {"tree": [[0], [0, 0]]})
    'static tree of 2'
    """
    tree = shape.get("tree")
    if tree:
        return f"{growth} tree of {len(_items(tree)) if nodes is None else nodes}"
    sizes = [_plain(value) for key, value in shape.items() if key not in ("draft", "tree")]
    return f"{growth} {'/'.join(sizes)}".rstrip()


def _plain(value: object) -> str:
    return ".".join(map(str, _items(value)))


def _items(value: object) -> Sequence[object]:
    return value if _several(value) else (value,)


def _several(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, tuple | list)

"""Trees of ranks: fixed shapes where a node says which of its parent's most likely tokens it is.

A path (2, 0) is the likeliest token after the third likeliest one. A set of paths is a tree if with
every path its parent and its elder sibling are there. Which one to take follows from how often the
token of each rank is right: `search`. Files hold the paths as JSON, alone or under "paths".
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import prod
from pathlib import Path
from typing import Any

from drafters.errors import UserError
from drafters.untrusted import read_json

Paths = tuple[tuple[int, ...], ...]
_FORM = "give a JSON list of paths of ranks such as [[0], [1], [0, 0]], alone or under 'paths'"


@dataclass(frozen=True)
class Level:
    """The nodes of one depth, those of one parent together and by rank.

    Args:
        above: of each node, its parent's place among the expanded nodes of the level before.
        rank: of each node among its siblings.
        expanded: places of the nodes that have children.
    """

    above: tuple[int, ...]
    rank: tuple[int, ...]
    expanded: tuple[int, ...]


def levels_of(paths: Iterable[tuple[int, ...]]) -> list[Level]:
    """Return a tree level by level.

    >>> levels_of([(0,), (1,), (1, 0)])[0]
    Level(above=(0, 0), rank=(0, 1), expanded=(1,))

    Raises:
        UserError: if the paths are no tree; names one.
    """
    nodes = sorted(paths)
    known = {(), *nodes}
    for path in nodes:
        missing = [path[:-1]] if path[:-1] not in known else []
        if path[-1] and (*path[:-1], path[-1] - 1) not in known:
            missing.append((*path[:-1], path[-1] - 1))
        if missing:
            raise UserError(f"the tree has the path {list(path)} without {list(missing[0])}")
    if len(known) <= len(nodes):
        raise UserError("the tree has a path twice")
    inner, levels = {path[:-1] for path in nodes}, list[Level]()
    expanded: list[tuple[int, ...]] = [()]
    while expanded:
        level = [path for path in nodes if len(path) == len(levels) + 1]
        above = tuple(expanded.index(path[:-1]) for path in level)
        places = tuple(place for place, path in enumerate(level) if path in inner)
        levels.append(Level(above, tuple(path[-1] for path in level), places))
        expanded = [level[place] for place in places]
    return levels


def full(branching: Sequence[int]) -> Paths:
    """Return the paths of a tree whose nodes of depth d - 1 all have branching[d - 1] children.

    >>> full([2, 1])
    ((0,), (1,), (0, 0), (1, 0))
    """
    found, level = list[tuple[int, ...]](), [()]
    for width in branching:
        level = [(*path, rank) for path in level for rank in range(width)]
        found += level
    return tuple(found)


def search(accuracies: Sequence[Sequence[float]], nodes: int) -> Paths:
    """Return the tree of at most so many nodes with the most accepted tokens to expect.

    Depths are taken as independent, so a path is right as often as the product of its ranks'
    accuracies says. That falls along both ways on, to the next sibling and to the first child:
    taking the best of what can be added is then optimal.

    Args:
        accuracies: [depths][ranks], how often the token of a rank (from 0, the likeliest) is right
            at a depth where all above it is; not rising with the rank.
        nodes: 1 or more.

    Returns:
        Paths in the order in which they were added; a smaller budget's are its beginning.

    Source: Cai et al. 2024 (Medusa, arXiv 2401.10774, section 2.3.3).

    >>> search([[0.6, 0.2], [0.5, 0.1]], 3)
    ((0,), (0, 0), (1,))

    Raises:
        UserError: if there is nothing to choose from.
    """
    if nodes < 1 or not accuracies or not all(accuracies):
        raise UserError(
            f"a tree of {nodes} nodes over {len(accuracies)} depths: give 1 or more of "
            "both, and an accuracy of one rank a depth"
        )
    found = list[tuple[int, ...]]()
    frontier: list[tuple[float, tuple[int, ...]]] = [(-accuracies[0][0], (0,))]
    while frontier and len(found) < nodes:
        path = heappop(frontier)[1]
        found.append(path)
        for way in ((*path[:-1], path[-1] + 1), (*path, 0)):
            if len(way) <= len(accuracies) and way[-1] < len(accuracies[len(way) - 1]):
                heappush(frontier, (-value(way, accuracies), way))
    return tuple(found)


def value(path: Sequence[int], accuracies: Sequence[Sequence[float]]) -> float:
    """Return how often a path is right all along."""
    return prod(accuracies[depth][rank] for depth, rank in enumerate(path))


def expected(paths: Paths, accuracies: Sequence[Sequence[float]]) -> float:
    """Return the accepted tokens a round to expect of a tree; tau is one more.

    >>> round(expected(((0,), (1,), (0, 0)), [[0.6, 0.2], [0.5]]), 6)
    1.1
    """
    return sum(value(path, accuracies) for path in paths)


def read_paths(file: str | Path) -> Paths:
    """Read a tree from a file.

    Raises:
        UserError: if there is none.
    """
    try:
        held: dict[str, Any] | list[Any] = read_json(Path(file))
        given = held["paths"] if isinstance(held, dict) else held
        paths: Paths = tuple(tuple(path) for path in given)
    except (UserError, KeyError, TypeError) as error:
        raise UserError(f"tree {file} cannot be read ({error}): {_FORM}") from error
    if not paths or not all(path and all(_is_rank(x) for x in path) for path in paths):
        raise UserError(f"tree {file} holds no paths of ranks: {_FORM}")
    return paths


def _is_rank(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0

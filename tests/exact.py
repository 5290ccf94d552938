"""Exact laws: walk every outcome of a random procedure and sum the probabilities."""

from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafters.laws import Law, Laws
from drafters.tree import TokenTree


class WalkingCoin:
    """A coin that replays given decisions and then takes the first branch of each new one.

    Works with fractions and with floats. A decision of probability 0 is never a branch.
    """

    def __init__(self, decisions: Sequence[int]) -> None:
        self.decisions = list(decisions)
        self.taken: list[tuple[int, int]] = []  # (branch, number of branches)
        self.probability: Any = 1

    def _branch(self, weights: Sequence[Any]) -> int:
        place = len(self.taken)
        branch = self.decisions[place] if place < len(self.decisions) else 0
        self.taken.append((branch, len(weights)))
        self.probability = self.probability * weights[branch]
        return branch

    def accept(self, probability: Any) -> bool:
        if probability >= 1:
            return True
        if probability <= 0:
            return False
        return self._branch([probability, 1 - probability]) == 0

    def draw(self, law: Law) -> int:
        weights = [w if isinstance(w, Fraction) else float(w) for w in law.weights]
        live = [i for i, w in enumerate(weights) if w > 0]
        total = sum(weights)
        index = live[0]
        if len(live) > 1:
            index = live[self._branch([weights[i] / total for i in live])]
        return index if law.ids is None else int(law.ids[index])

    def draw_distinct(self, probs: Tensor, count: int) -> Tensor:
        rows = []
        for row in probs:
            law, chosen = Law(row), []
            for _ in range(count):
                if not law.weights.sum() > 0:  # nothing left: any unused index, its law is zero
                    chosen.append(next(i for i in range(len(row)) if i not in chosen))
                    continue
                chosen.append(self.draw(law))
                law = law.without(chosen[-1])
            rows.append(chosen)
        return torch.tensor(rows)


def exact_law(procedure: Callable[[WalkingCoin], Hashable]) -> dict[Any, Any]:
    """Return {result: probability} of a procedure, over all outcomes of its coin."""
    law: dict[Any, Any] = {}
    decisions: list[int] = []
    while True:
        coin = WalkingCoin(decisions)
        result = procedure(coin)
        law[result] = law.get(result, 0) + coin.probability
        path = coin.taken
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return law
        decisions = [branch for branch, _ in path[:-1]] + [path[-1][0] + 1]


def fractions(*rows: Sequence[int | str]) -> np.ndarray:
    """Make rows of fractions; a row is scaled to sum to one."""
    table = [[Fraction(value) for value in row] for row in rows]
    return np.array([[value / sum(row) for value in row] for row in table], dtype=object)


def laws_of(rows: np.ndarray, ids: np.ndarray | None = None) -> Laws:
    """Wrap a table of laws, one per node."""
    return Laws(rows, ids, torch.arange(len(rows)))


def extended(
    law: dict[tuple[int, ...], Any], target: Callable[[tuple[int, ...]], Sequence[Any]], length: int
) -> dict[tuple[int, ...], Any]:
    """Extend emitted sequences with the target's law to `length` tokens: the joint law."""
    joint: dict[tuple[int, ...], Any] = {}
    for emitted, probability in law.items():
        missing = length - len(emitted)
        for rest in product(range(len(target(()))), repeat=max(missing, 0)):
            whole, weight = emitted, probability
            for token in rest:
                weight = weight * target(whole)[token]
                whole = (*whole, token)
            if weight:
                key = whole[:length]
                joint[key] = joint.get(key, 0) + weight
    return joint


def target_joint(
    target: Callable[[tuple[int, ...]], Sequence[Any]], size: int, length: int
) -> dict[tuple[int, ...], Any]:
    """Return the target's own joint law of `length` tokens."""
    return extended({(): 1}, target, length) if size else {}


def emitted(tree: TokenTree, path: Sequence[int], token: int) -> tuple[int, ...]:
    """Return the tokens a verdict emits."""
    return (*(tree.token_list[node] for node in path[1:]), token)

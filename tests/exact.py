"""Exact laws: walk every outcome of a random procedure and sum the probabilities."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafters.laws import Law, Laws
from drafters.tree import TokenTree
from inference.verify import Verifier


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
        weights = [w if isinstance(w, Fraction | int) else float(w) for w in law.weights]
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


def outcomes(procedure: Callable[[WalkingCoin], Any]) -> Iterator[tuple[Any, Any]]:
    """Yield (result, probability) of every outcome of a procedure's coin."""
    decisions: list[int] = []
    while True:
        coin = WalkingCoin(decisions)
        result = procedure(coin)
        yield result, coin.probability
        path = coin.taken
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return
        decisions = [branch for branch, _ in path[:-1]] + [path[-1][0] + 1]


def exact_law(procedure: Callable[[WalkingCoin], Hashable]) -> dict[Any, Any]:
    """Return {result: probability} of a procedure, over all outcomes of its coin."""
    law: dict[Any, Any] = {}
    for result, probability in outcomes(procedure):
        law[result] = law.get(result, 0) + probability
    return law


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


def markov(table: np.ndarray, start: int = 0) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Return a law that depends on the last token only; the empty context is token `start`."""
    return lambda context: table[context[-1] if context else start]


def drawn_tree(
    q: np.ndarray, branching: Sequence[int], coin: WalkingCoin, *, distinct: bool, start: int = 0
) -> TokenTree:
    """Draw a tree of this branching from q below token `start`, children i.i.d. or distinct."""
    tokens, parent, rows = [start], [-1], []
    level = [0]
    for width in branching:
        above, level = level, []
        for node in above:
            law = Law(q[tokens[node]])
            for _ in range(width):
                normal = law.normalised()
                if normal is None:  # no mass left: this sibling cannot exist
                    break
                token = coin.draw(normal)
                level.append(len(tokens))
                tokens.append(token)
                parent.append(node)
                rows.append(normal.weights)
                law = normal.without(token) if distinct else law
    drawn = Laws(np.array(rows, dtype=object), None, torch.arange(len(rows)))
    return TokenTree(torch.tensor(tokens), torch.tensor(parent), drawn)


def judged_law(verify: Verifier, p: np.ndarray, draw: Callable[[WalkingCoin], TokenTree]) -> dict:
    """Return the law of what is emitted when a tree is drawn and judged by next-token laws p.

    Drafting noise and judging noise are independent, so they are walked one inside the other.
    """
    law: dict[tuple[int, ...], Any] = {}
    for tree, drawn in outcomes(draw):
        laws = laws_of(p[tree.token_list])
        for verdict, probability in outcomes(partial(verify, laws, tree)):
            key = emitted(tree, verdict.path, verdict.token)
            law[key] = law.get(key, 0) + drawn * probability
    return law


def round_law(
    verify: Verifier,
    p: np.ndarray,
    q: np.ndarray,
    branching: Sequence[int],
    *,
    distinct: bool = False,
    start: int = 0,
) -> dict:
    """Return the law of what one round emits after token `start`."""
    return judged_law(
        verify,
        p,
        lambda coin: drawn_tree(q, branching, coin, distinct=distinct, start=start),
    )


def is_exact(law: dict, p: np.ndarray, length: int, start: int = 0) -> bool:
    """Tell whether what is emitted, extended to `length` tokens, follows the target's law."""
    target = markov(p, start)
    return extended(law, target, length) == target_joint(target, len(p), length)


def mean_length(law: dict) -> Any:
    """Return the mean number of tokens a round emits."""
    return sum(len(tokens) * probability for tokens, probability in law.items())

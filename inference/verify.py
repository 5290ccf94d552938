"""Verifiers: from the target's laws and a drafted tree to the tokens that are emitted.

Pure functions. Randomness comes in as a coin, so that a test can walk every outcome and sum the
emitted law exactly, with fractions in place of floats.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from drafters.laws import Law, Laws
from drafters.tree import TokenTree


class Coin(Protocol):
    """Where a verifier's randomness comes from."""

    def accept(self, probability: float) -> bool:
        """Return True with this probability."""
        ...

    def draw(self, law: Law) -> int:
        """Draw a token; the law's weights need not be normalised."""
        ...


@dataclass(frozen=True)
class Verdict:
    """What a verifier decided.

    Args:
        path: accepted nodes, the root (0) first.
        token: the token emitted after them: bonus, or correction of a refusal.
    """

    path: list[int]
    token: int


Verifier = Callable[[Laws, TokenTree, Coin], Verdict]


def lossless(p: Laws, tree: TokenTree, coin: Coin) -> Verdict:
    """Walk the tree so that the emitted tokens follow the target's law exactly.

    At a node with residual r, a child x drawn from q is taken with probability min(1, r(x)/q(x));
    after a refusal r becomes (r - q)+ normalised, and the next sibling is tried. Children that are
    point masses need one draw together: y ~ r, descend if y is a child, else emit y; this equals
    trying them one by one, without the rounding of repeated renormalisation.

    Args:
        p: the target's laws, warped; law i is the next token's after node i; each sums to 1.
        tree: whose nodes carry the laws they were drawn from.
        coin: where randomness comes from.

    Returns:
        Accepted nodes, root first, and one token drawn from the last residual.

    Raises:
        ValueError: if p has not one law per node.

    Source: Leviathan et al. 2023, Alg. 1 (chains); Miao et al. 2024, SpecInfer (siblings).
    """
    if len(p) != len(tree):
        raise ValueError(f"{len(p)} laws for {len(tree)} nodes: give one law per node")
    path = [0]
    while True:
        child, token = _choose(p.law(path[-1]), path[-1], tree, coin)
        if child is None:
            return Verdict(path, token)
        path.append(child)


def _choose(residual: Law, node: int, tree: TokenTree, coin: Coin) -> tuple[int | None, int]:
    """Return the child taken (None: no child) and the token emitted at this node."""
    children = tree.children[node]
    laws = [None if tree.laws is None else tree.laws.drawn_from(child) for child in children]
    sampled = max((i + 1 for i, law in enumerate(laws) if law is not None), default=0)
    for child, law in zip(children[:sampled], laws, strict=False):
        token = tree.token_list[child]
        weight = residual.weight(token)
        if coin.accept(weight if law is None else weight / law.weight(token)):
            return child, token
        left = residual.without(token) if law is None else residual.minus(law)
        # a refusal leaves mass unless rounding ate it; then r is as good as the last residual
        residual = left.normalised() or residual
    token = coin.draw(residual)
    tokens = {tree.token_list[child]: child for child in children[sampled:]}
    return tokens.get(token), token

"""Verifiers: from the target's laws and a drafted tree to the tokens that are emitted.

Pure functions. Randomness comes in as a coin, so that a test can walk every outcome and sum the
emitted law exactly, with fractions in place of floats. Which of them may judge which drafts is
inference/modes.py's business. All emit the target's law exactly but `typical`, which is LOSSY.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log
from typing import Any, Protocol

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
    _check(p, tree)
    path = [0]
    while True:
        child, token = _choose(p.law(path[-1]), path[-1], tree, coin)
        if child is None:
            return Verdict(path, token)
        path.append(child)


def _choose(residual: Law, node: int, tree: TokenTree, coin: Coin) -> tuple[int | None, int]:
    """Return the child taken (None: no child) and the token emitted at this node."""
    children = tree.children[node]
    laws = [_drawn_from(tree, child) for child in children]
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


def block(p: Laws, tree: TokenTree, coin: Coin) -> Verdict:
    """Judge a sampled chain as a whole: the same law as `lossless`, at least as many accepted.

    With P_i, Q_i the laws after x_1..x_i: w_0 = 1, w_i = min(1, w_(i-1) P_(i-1)(x_i)/Q_(i-1)(x_i)),
    S_i = sum (w_i P_i - Q_i)+, h_i = S_i / (S_i + 1 - w_i), h_gamma = w_gamma. The largest i whose
    own coin falls below h_i is accepted (i = 0 if none): a refusal ends nothing, so the scan runs
    from the end. The token after it comes from (w_i P_i - Q_i)+, after gamma from P_gamma.

    Why it accepts as many: P(a >= i | x_1..x_i) = w_i. Downwards, P(a >= i+1) = sum min(Q_i,
    w_i P_i) = w_i - S_i, and (w_i - S_i) + (1 - w_i + S_i) h_i = w_i. `lossless` accepts i with
    prod min(1, ratio_j) <= w_i: here a shortfall may be repaid by a later ratio above 1.

    Args:
        p: as for `lossless`.
        tree: one that branches is judged by `traversal`, the same rule with siblings; a chain of
            point masses gains nothing and is judged by `lossless`.
        coin: where randomness comes from.

    Raises:
        ValueError: if p has not one law per node.

    Source: Sun et al. 2025, Block verification accelerates speculative decoding, Alg. 2.
    """
    _check(p, tree)
    if tree.laws is None:
        return lossless(p, tree, coin)
    if not tree.is_chain:
        return traversal(p, tree, coin)
    arrivals: list[Any] = [1]
    for node in range(1, len(tree)):
        arrivals.append(_arrival(arrivals[-1], p.law(node - 1), tree, node))
    last = tree.drafted
    if coin.accept(arrivals[last]):
        return Verdict(list(range(len(tree))), coin.draw(p.law(last)))
    for node in reversed(range(last)):
        left = _left(arrivals[node], p.law(node), tree, node + 1)
        mass = left.weights.sum()
        if node == 0 or coin.accept(_share(mass, arrivals[node])):
            return Verdict(list(range(node + 1)), coin.draw(left if mass > 0 else p.law(node)))
    raise AssertionError  # the root is always accepted


def traversal(p: Laws, tree: TokenTree, coin: Coin) -> Verdict:
    """Judge a sampled tree from its leaves up: `block` with siblings, the same law as `lossless`.

    A node is reached with the ratio r of its whole path and the law P after it. Its children are
    visited in drawn order, child c with ratio min(1, r P(c)/q(c)); each that fails leaves
    S = sum (r P - q)+, P = (r P - q)+ / S, r = S / (S + 1 - r). The node is then accepted with
    probability r (the root surely) and a token drawn from P, or the failure goes to its parent.

    Args:
        p: as for `lossless`.
        tree: whose nodes carry the laws they were drawn from; one of point masses gains nothing
            and is judged by `lossless`.
        coin: where randomness comes from.

    Raises:
        ValueError: if p has not one law per node.

    Source: Weng et al. 2025, Traversal verification for speculative tree decoding.
    """
    _check(p, tree)
    if tree.laws is None:
        return lossless(p, tree, coin)
    found = _visit(0, 1, p, tree, coin)
    assert found is not None  # the root is always accepted
    node, law = found
    return Verdict(tree.path(node), coin.draw(law))


def _visit(node: int, ratio: Any, p: Laws, tree: TokenTree, coin: Coin) -> tuple[int, Law] | None:
    """Return the accepted node at or below this one and the law of the token after it."""
    law = p.law(node)
    for child in tree.children[node]:
        found = _visit(child, _arrival(ratio, law, tree, child), p, tree, coin)
        if found is not None:
            return found
        left = _left(ratio, law, tree, child)
        mass = left.weights.sum()
        law, ratio = left.normalised() or law, _share(mass, ratio)
    return (node, law) if coin.accept(ratio) else None


def typical(
    p: Laws, tree: TokenTree, coin: Coin, *, most: float = 0.09, scale: float = 0.3
) -> Verdict:
    """LOSSY: accept what is likely enough; the emitted tokens do not follow the target's law.

    Token x is typical of p if p(x) > min(most, scale * exp(-H(p))), H in nats. The longest path of
    typical nodes is accepted, the likeliest where several are; the token after it is drawn from p
    restricted to its typical tokens, of which the likeliest always is one. A point mass makes it
    exact: at temperature 0 it is greedy decoding.

    Args:
        p: as for `lossless`.
        tree: of point masses.
        coin: where randomness comes from.
        most: the threshold where p is sharp; epsilon in the paper.
        scale: the threshold's factor where p is flat; delta in the paper.

    Raises:
        ValueError: if p has not one law per node.

    Source: Cai et al. 2024, Medusa, section 2.3.1.
    """
    _check(p, tree)
    floors = [_floor(p.law(node), most, scale) for node in range(len(tree))]
    scores: dict[int, tuple[int, float]] = {0: (0, 0.0)}
    for node in range(1, len(tree)):
        parent = tree.parent_list[node]
        weight = float(p.law(parent).weight(tree.token_list[node]))
        if parent in scores and weight > floors[parent]:
            depth, total = scores[parent]
            scores[node] = depth + 1, total + log(weight)
    best = max(scores, key=lambda node: scores[node])
    law = p.law(best)
    return Verdict(tree.path(best), coin.draw(law.times(law.weights > floors[best])))


def _floor(law: Law, most: float, scale: float) -> float:
    weights = law.weights[law.weights > 0]
    entropy = -float((weights * weights.log()).sum())
    return min(most, scale * exp(-entropy))


def _check(p: Laws, tree: TokenTree) -> None:
    if len(p) != len(tree):
        raise ValueError(f"{len(p)} laws for {len(tree)} nodes: give one law per node")


def _arrival(ratio: Any, law: Law, tree: TokenTree, child: int) -> Any:
    """Return min(1, r p(x) / q(x)): the ratio that a child is reached with."""
    drawn, token = _drawn_from(tree, child), tree.token_list[child]
    weight = ratio * law.weight(token)
    return min(1, weight if drawn is None else weight / drawn.weight(token))


def _left(ratio: Any, law: Law, tree: TokenTree, child: int) -> Law:
    """Return (r p - q)+, q the law that the child was drawn from."""
    drawn, scaled = _drawn_from(tree, child), law.times(ratio)
    return scaled.without(tree.token_list[child]) if drawn is None else scaled.minus(drawn)


def _share(mass: Any, ratio: Any) -> Any:
    """Return S / (S + 1 - r): how likely a node is accepted that a child has failed below."""
    whole = mass + (1 - ratio)
    return mass / whole if whole > 0 else 1


def _drawn_from(tree: TokenTree, node: int) -> Law | None:
    return None if tree.laws is None else tree.laws.drawn_from(node)

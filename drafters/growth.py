"""Growth: which nodes a tree gets. A drafter answers `step(frontier) -> logits`; a policy asks.

All drafting rows grow in lockstep with one shape; what differs is their tokens. Whether a drawn
token is submitted never depends on that token (non-anticipation): policies that choose nodes by
their own score (dynamic) therefore take point masses only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drafters.errors import UserError
from drafters.frontier import Frontier
from drafters.laws import Laws
from drafters.sampling import Coin, Warp
from drafters.tree import TokenTree, chain_parents

DRAFT_MODES = ("argmax", "sampled")


class Guesser(Protocol):
    """What a session shows to a growth policy for the rows that draft in this round."""

    @property
    def ids(self) -> Tensor | None:
        """Return the draft vocabulary [K], None for the target's own."""
        ...

    def root_logits(self) -> Tensor:
        """Return the drafter's logits [R, K] of the token after each root."""
        ...

    def step(self, frontier: Frontier) -> Tensor:
        """Return logits [R, F, K] of the token after each frontier node."""
        ...


class Growth(Protocol):
    """A growth policy: `depth` levels and at most `nodes` drafted nodes."""

    @property
    def depth(self) -> int:
        """Return the number of levels below the root."""
        ...

    @property
    def draft(self) -> str:
        """Return how tokens are chosen: argmax or sampled."""
        ...

    @property
    def nodes(self) -> int:
        """Return the largest number of drafted nodes."""
        ...

    @property
    def cells(self) -> int:
        """Return the largest number of nodes that a drafter's cache holds beyond the prefix."""
        ...

    def grow(
        self, roots: Sequence[int], guesser: Guesser, warp: Warp, coins: Sequence[Coin]
    ) -> list[TokenTree]:
        """Grow one tree a row below the given roots."""
        ...


def _target_ids(choice: Tensor, ids: Tensor | None) -> Tensor:
    return choice if ids is None else ids[choice]


def _drawable(warp: Warp, logits: Tensor, ids: Tensor | None = None) -> Laws:
    """Return the laws to draw drafts from, uniform where the drafter's states overflowed.

    Any law will do as long as it is the one that was drawn from; a NaN is none.
    """
    laws = warp.laws(logits, ids)
    broken = ~laws.probs.sum(-1).isfinite()
    if bool(broken.any()):
        laws.probs[broken] = 1 / laws.probs.shape[-1]
    return laws


def _check_draft(draft: str, allowed: Sequence[str], growth: str) -> None:
    if draft not in allowed:
        raise UserError(f"draft is {draft!r} with growth {growth}: give {' or '.join(allowed)}")


def _check_at_least(value: object, least: int, name: str) -> None:
    if not isinstance(value, int) or value < least:
        raise UserError(f"{name} is {value!r}: give a whole number of {least} or more")


@dataclass(frozen=True)
class Chain:
    """gamma tokens without branches: argmax, or drawn from the drafter's warped law."""

    gamma: int = 4
    draft: str = "argmax"

    def __post_init__(self) -> None:
        """Check the values."""
        _check_at_least(self.gamma, 1, "gamma")
        _check_draft(self.draft, DRAFT_MODES, "chain")

    @property
    def depth(self) -> int:
        """Return gamma."""
        return self.gamma

    @property
    def nodes(self) -> int:
        """Return gamma."""
        return self.gamma

    @property
    def cells(self) -> int:
        """Return gamma."""
        return self.gamma

    def grow(
        self, roots: Sequence[int], guesser: Guesser, warp: Warp, coins: Sequence[Coin]
    ) -> list[TokenTree]:
        """Grow one chain a row."""
        sampled = self.draft == "sampled" and not warp.greedy
        logits = guesser.root_logits()
        device = logits.device
        straight = torch.zeros(len(roots), 1, dtype=torch.int64, device=device)
        columns: list[Tensor] = [torch.tensor(roots, device=device)]
        laws: list[Tensor] = []
        for depth in range(1, self.gamma + 1):
            if sampled:
                law = _drawable(warp, logits, guesser.ids)
                laws.append(law.probs)
                drawn = [coin.draw(law.law(i)) for i, coin in enumerate(coins)]
                columns.append(torch.tensor(drawn, device=device))
            else:
                columns.append(_target_ids(logits.argmax(-1), guesser.ids))
            if depth < self.gamma:
                frontier = Frontier(columns[-1][:, None], straight, depth)
                logits = guesser.step(frontier)[:, 0]
        tokens = torch.stack(columns, 1).cpu()
        parent, of = chain_parents(self.gamma + 1), torch.arange(self.gamma)
        if not sampled:
            return [TokenTree(row, parent) for row in tokens]
        probs = torch.stack(laws, 1)
        return [
            TokenTree(row, parent, Laws(probs[i], guesser.ids, of)) for i, row in enumerate(tokens)
        ]


@dataclass(frozen=True)
class Static:
    """A fixed shape: every node of depth d - 1 has branching[d - 1] children.

    Children are the most likely tokens, or drawn without replacement from the drafter's law.
    """

    branching: tuple[int, ...] = (3, 1, 1)
    draft: str = "argmax"

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.branching:
            raise UserError("branching is empty: give children per depth, such as 3.2.1")
        for value in self.branching:
            _check_at_least(value, 1, "branching")
        _check_draft(self.draft, DRAFT_MODES, "static")

    @property
    def depth(self) -> int:
        """Return the number of levels."""
        return len(self.branching)

    @property
    def nodes(self) -> int:
        """Return the number of drafted nodes."""
        total, level = 0, 1
        for width in self.branching:
            level *= width
            total += level
        return total

    @property
    def cells(self) -> int:
        """Return the number of drafted nodes."""
        return self.nodes

    def parents(self) -> Tensor:
        """Return the shape's parents [N+1], level by level."""
        parent, level = [-1], [0]
        for width in self.branching:
            above = [node for node in level for _ in range(width)]
            level = list(range(len(parent), len(parent) + len(above)))
            parent += above
        return torch.tensor(parent)

    def grow(
        self, roots: Sequence[int], guesser: Guesser, warp: Warp, coins: Sequence[Coin]
    ) -> list[TokenTree]:
        """Grow one tree of the shape a row."""
        sampled = self.draft == "sampled" and not warp.greedy
        logits = guesser.root_logits()[:, None]
        columns: list[Tensor] = [torch.tensor(roots, device=logits.device)[:, None]]
        laws: list[Tensor] = []
        of: list[int] = []
        for depth, width in enumerate(self.branching, start=1):
            if width > logits.shape[-1]:
                raise UserError(
                    f"branching is {width} at depth {depth} and the draft vocabulary has "
                    f"{logits.shape[-1]} ids: give that or less"
                )
            if sampled:
                probs = _drawable(warp, logits.flatten(0, 1)).probs.view(logits.shape)
                choice = torch.stack(
                    [coin.draw_distinct(probs[i], width) for i, coin in enumerate(coins)]
                )
                first = sum(x.shape[1] for x in laws)
                siblings = _shrinking(probs, choice)
                laws.append(siblings)
                of += range(first, first + siblings.shape[1])
            else:
                choice = logits.topk(width, dim=-1).indices
            tokens = _target_ids(choice, guesser.ids)
            columns.append(tokens.flatten(1))
            if depth < self.depth:
                above = torch.arange(tokens.shape[1], device=tokens.device)
                above = above.repeat_interleave(width)
                frontier = Frontier(columns[-1], above.expand(len(roots), -1), depth)
                logits = guesser.step(frontier)
        tokens, parent = torch.cat(columns, 1).cpu(), self.parents()
        if not sampled:
            return [TokenTree(row, parent) for row in tokens]
        drawn, index = torch.cat(laws, 1), torch.tensor(of)
        return [
            _without_impossible(TokenTree(row, parent, Laws(drawn[i], guesser.ids, index)))
            for i, row in enumerate(tokens)
        ]


def _shrinking(probs: Tensor, choice: Tensor) -> Tensor:
    """Return the law of each drawn sibling [R, F * width, K]: elder siblings' mass removed."""
    laws: list[Tensor] = []
    current = probs.clone()
    for place in range(choice.shape[-1]):
        total = current.sum(-1, keepdim=True)
        laws.append(current / total.clamp_min(torch.finfo(current.dtype).tiny))
        current = current.scatter(-1, choice[..., place : place + 1], 0.0)
    return torch.stack(laws, 2).flatten(1, 2)


def _without_impossible(tree: TokenTree) -> TokenTree:
    """Drop nodes drawn where no mass was left, with all below: such draws do not exist.

    This depends on the law's support and the elder siblings, never on the token itself.
    """
    laws = tree.laws
    assert laws is not None
    alive, index = [0], {0: 0}
    for node, parent in enumerate(tree.parent_list[1:], start=1):
        if parent in index and bool(laws.probs[laws.of_list[node - 1]].sum() > 0):
            index[node] = len(alive)
            alive.append(node)
    if len(alive) == len(tree):
        return tree
    keep = torch.tensor(alive)
    parent = torch.tensor([-1] + [index[tree.parent_list[n]] for n in alive[1:]])
    of = laws.of[keep[1:] - 1]
    return TokenTree(tree.tokens[keep], parent, Laws(laws.probs, laws.ids, of))


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's growth: expand the `width` best nodes a level, keep the `nodes` best of all.

    A node's value is the sum of log q along its path; equal values keep the earlier node, so the
    kept set is closed under parents. Source: Li et al. 2024, EAGLE-2, section 4.
    """

    nodes: int = 8
    width: int = 4
    depth: int = 4
    draft: str = "argmax"

    def __post_init__(self) -> None:
        """Check the values."""
        _check_at_least(self.nodes, 1, "nodes")
        _check_at_least(self.width, 1, "width")
        _check_at_least(self.depth, 1, "depth")
        _check_draft(self.draft, ("argmax",), "dynamic")

    @property
    def cells(self) -> int:
        """Return the nodes that are expanded."""
        return self.width * (self.depth - 1)

    def grow(
        self, roots: Sequence[int], guesser: Guesser, warp: Warp, coins: Sequence[Coin]
    ) -> list[TokenTree]:
        """Grow one tree a row."""
        rows = len(roots)
        value, choice = _best_children(guesser.root_logits()[:, None], self.width)
        values, tokens = [value.flatten(1)], [_target_ids(choice, guesser.ids).flatten(1)]
        parents = [torch.full_like(tokens[0], -1)]  # by creation index; -1: the root
        frontier = Frontier(tokens[0], torch.zeros_like(tokens[0]), 1)
        path = values[0]
        first = torch.arange(path.shape[1], device=path.device).expand(rows, -1)
        for depth in range(2, self.depth + 1):
            value, choice = _best_children(guesser.step(frontier), self.width)
            value = (path[..., None] + value).flatten(1)
            below = _target_ids(choice, guesser.ids).flatten(1)
            above = torch.arange(path.shape[1], device=path.device)
            above = above.repeat_interleave(choice.shape[-1]).expand(rows, -1)
            created = sum(x.shape[1] for x in values)
            values.append(value)
            tokens.append(below)
            parents.append(first.gather(1, above))
            if depth == self.depth:
                break
            path, best = value.topk(min(self.width, value.shape[1]), dim=-1)
            frontier = Frontier(below.gather(1, best), above.gather(1, best), depth)
            first = created + best
        return _keep_best(roots, values, tokens, parents, self.nodes)


def _best_children(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return log q and index of the most likely children [R, F, width]."""
    best = logits.topk(min(width, logits.shape[-1]), dim=-1)
    value = best.values.float() - logits.float().logsumexp(-1, keepdim=True)
    return value.clamp_max(0.0), best.indices


def _keep_best(
    roots: Sequence[int],
    values: list[Tensor],
    tokens: list[Tensor],
    parents: list[Tensor],
    nodes: int,
) -> list[TokenTree]:
    """Keep the best nodes of all levels, renumbered in creation order below the root."""
    value, token, parent = (torch.cat(x, 1) for x in (values, tokens, parents))
    order = value.sort(dim=-1, descending=True, stable=True).indices
    kept = order[:, :nodes].sort(dim=-1).values
    above = parent.gather(1, kept)
    place = torch.searchsorted(kept, above.clamp_min(0)) + 1
    place = torch.where(above < 0, 0, place)
    all_parents = torch.cat((torch.full((len(roots), 1), -1), place.cpu()), 1)
    all_tokens = torch.cat((torch.tensor(roots)[:, None], token.gather(1, kept).cpu()), 1)
    return [TokenTree(t, p) for t, p in zip(all_tokens, all_parents, strict=True)]


POLICIES: dict[str, type[Chain] | type[Static] | type[Dynamic]] = {
    "chain": Chain,
    "static": Static,
    "dynamic": Dynamic,
}


def build_growth(name: str, options: dict[str, int | str | tuple[int, ...]]) -> Growth:
    """Make a policy by name.

    Raises:
        UserError: on an unknown policy or option; names what is allowed.
    """
    if name not in POLICIES:
        raise UserError(f"growth is {name!r}: give {', '.join(POLICIES)}")
    policy = POLICIES[name]
    known = set(policy.__dataclass_fields__)
    for option in options:
        if option not in known:
            raise UserError(
                f"growth {name} has no option {option!r}: give {', '.join(sorted(known))}"
            )
    return policy(**options)  # type: ignore[arg-type]

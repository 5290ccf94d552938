"""Dynamic: EAGLE-2's growth, the best nodes by the drafter's own law."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from drafters.frontier import Frontier
from drafters.growth.base import FixedShape, Guesser, check_draft, check_size, target_ids
from drafters.sampling import Coin, Warp
from drafters.tree import TokenTree


@dataclass(frozen=True)
class Dynamic(FixedShape):
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
        check_size(self.nodes, "nodes")
        check_size(self.width, "width")
        check_size(self.depth, "depth")
        check_draft(self.draft, ("argmax",), "dynamic")

    @property
    def expanded(self) -> int:
        """Return the width."""
        return self.width

    @property
    def levels(self) -> int:
        """Return the depth: every round is worth drafting for."""
        return self.depth

    @property
    def cells(self) -> int:
        """Return the nodes that are expanded."""
        return self.width * (self.depth - 1)

    def grow(
        self, roots: Sequence[int], guesser: Guesser, warp: Warp, coins: Sequence[Coin]
    ) -> list[TokenTree]:
        """Grow one tree a row."""
        return grow_best(roots, guesser, nodes=self.nodes, width=self.width, depth=self.depth)


def grow_best(
    roots: Sequence[int], guesser: Guesser, *, nodes: int, width: int, depth: int
) -> list[TokenTree]:
    """Score the children of the best `width` nodes of every level; keep the `nodes` best of all.

    A node below which nothing can be kept is not expanded: nobody's children exceed it, and of
    equals the earlier are kept.
    """
    rows = len(roots)
    value, choice = best_children(guesser.root_logits()[:, None], width)
    values, tokens = [value.flatten(1)], [target_ids(choice, guesser.ids).flatten(1)]
    parents = [torch.full_like(tokens[0], -1)]  # by creation index; -1: the root
    above = torch.zeros_like(tokens[0])
    for level in range(1, depth):
        count = min(width, _hopeful(values, nodes))
        if count == 0:
            break
        path, best = values[-1].topk(count)
        frontier = Frontier(tokens[-1].gather(1, best), above.gather(1, best), level)
        first = sum(x.shape[1] for x in values[:-1]) + best
        value, choice = best_children(guesser.step(frontier), width)
        above = torch.arange(count, device=value.device)
        above = above.repeat_interleave(choice.shape[-1]).expand(rows, -1)
        values.append((path[..., None] + value).flatten(1))
        tokens.append(target_ids(choice, guesser.ids).flatten(1))
        parents.append(first.gather(1, above))
    return _keep_best(roots, values, tokens, parents, nodes)


def _hopeful(values: list[Tensor], nodes: int) -> int:
    """Return how many of the newest nodes may have children among the best, at most in a row."""
    found = torch.cat(values, 1)
    if found.shape[1] < nodes:
        return values[-1].shape[1]
    worst = found.topk(nodes).values[:, -1:]
    return int((values[-1] > worst).sum(1).max())


def best_children(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return log q and index of the most likely children [R, F, width].

    A law that is the same below every node comes as one copy seen F times, and is sorted once.
    """
    shape = (*logits.shape[:2], min(width, logits.shape[-1]))
    logits = logits[:, :1] if logits.stride(1) == 0 else logits
    best = logits.topk(shape[-1])
    value = best.values.float() - logits.float().logsumexp(-1, keepdim=True)
    return value.clamp_max(0.0).expand(shape), best.indices.expand(shape)


def _keep_best(
    roots: Sequence[int],
    values: list[Tensor],
    tokens: list[Tensor],
    parents: list[Tensor],
    nodes: int,
) -> list[TokenTree]:
    """Keep the best nodes of all levels, renumbered in creation order below the root."""
    value, token, parent = (torch.cat(x, 1) for x in (values, tokens, parents))
    order = value.sort(descending=True, stable=True).indices
    kept = order[:, :nodes].sort().values
    above = parent.gather(1, kept)
    place = torch.searchsorted(kept, above.clamp_min(0)) + 1
    place = torch.where(above < 0, 0, place)
    all_parents = torch.cat((torch.full((len(roots), 1), -1), place.cpu()), 1)
    all_tokens = torch.cat((torch.tensor(roots)[:, None], token.gather(1, kept).cpu()), 1)
    confidence = torch.cat((torch.zeros(len(roots), 1), value.gather(1, kept).cpu()), 1)
    return [TokenTree(*row) for row in zip(all_tokens, all_parents, repeat(None), confidence)]

"""Laws: probability distributions over next tokens, dense, on shared ids or sparse.

Owns their storage and the one operation verification needs: a residual that can be weighed,
reduced by another law and drawn from. The numbers are torch tensors in production and numpy arrays
of fractions in exact tests; nothing here converts between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Law:
    """One law: weights over ids.

    Args:
        weights: [K]; non-negative, not necessarily normalised.
        ids: [K] int64 token of each weight, unique; None when weight i belongs to token i.
    """

    weights: Any
    ids: Tensor | None = None

    def weight(self, token: int) -> Any:
        """Return the weight of a token, 0 if the law does not hold it."""
        if self.ids is None:
            return self.weights[token]
        return (self.weights * (self.ids == token)).sum()

    def times(self, factor: Any) -> "Law":
        """Return the law with its weights multiplied by one factor or by [K] factors."""
        return Law(self.weights * factor, self.ids)

    def without(self, token: int) -> "Law":
        """Return the law with one token's weight set to zero, not renormalised."""
        weights = self.weights + 0
        if self.ids is None:
            weights[token] = 0 * weights[token]
        else:
            weights = weights * (self.ids != token)
        return Law(weights, self.ids)

    def minus(self, other: "Law") -> "Law":
        """Return (self - other)+, not renormalised. Both must sum to one.

        `other` may hold fewer ids than self (reduced vocabulary, sparse candidates): its weights
        are subtracted where its ids lie.
        """
        weights = self.weights + 0
        if other.ids is self.ids:
            weights = weights - other.weights
        elif other.ids is None:
            weights = weights - other.weights[self.ids]
        elif self.ids is None:
            weights[other.ids] = weights[other.ids] - other.weights
        else:
            match = self.ids[:, None] == other.ids[None, :]
            weights = weights - (match * other.weights[None, :]).sum(1)
        return Law(weights.clip(0), self.ids)

    def normalised(self) -> "Law | None":
        """Return the law divided by its sum, or None if nothing is left."""
        total = self.weights.sum()
        return Law(self.weights / total, self.ids) if total > 0 else None


@dataclass(frozen=True)
class Laws:
    """The laws of a tree's nodes.

    Args:
        probs: [R, K] one law per group of siblings drawn alike (or per sibling); each sums to 1.
            A list of R laws [K_r] where they come from several drafters.
        ids: None if K is the whole vocabulary; [K] shared ids (reduced vocabulary); [R, K] sparse.
            A list of R ids [K_r] or None where probs is one.
        of: [N] int64; the law each drafted node was drawn from, -1 for a point mass. For a
            target's laws, `of` is arange(N+1): law i is the next token's after node i.
    """

    probs: Any
    ids: Any
    of: Tensor

    @classmethod
    def gathered(cls, laws: Sequence[Law], of: Tensor) -> "Laws":
        """Return laws of several drafters as one; each keeps its own ids."""
        return cls([law.weights for law in laws], [law.ids for law in laws], of)

    def __len__(self) -> int:
        """Return the number of laws R."""
        return len(self.probs)

    @cached_property
    def of_list(self) -> list[int]:
        """Return `of` as a list."""
        return self.of.tolist()

    @property
    def broken(self) -> Tensor:
        """Tell which laws [R] are none: those of logits that were not finite are NaN throughout."""
        return self.probs[..., 0].isnan()

    def law(self, index: int) -> Law:
        """Return law `index` of R."""
        if self.ids is None or (not isinstance(self.ids, list) and self.ids.ndim == 1):
            return Law(self.probs[index], self.ids)
        return Law(self.probs[index], self.ids[index])

    def drawn_from(self, node: int) -> Law | None:
        """Return the law that drafted node `node` (1..N) was drawn from; None: a point mass."""
        index = self.of_list[node - 1]
        return None if index < 0 else self.law(index)

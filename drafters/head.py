"""The target's head: from post-norm states to logits, on all ids or on some."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.linear import FrozenLinear


class TargetHead:
    """A frozen head with what the model does to its logits.

    Args:
        weight: [V, D], where states come from and logits lie.
        bias: [V], or None.
        values: the model's text config as a dict: scales and soft cap of the logits.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, values: dict[str, Any]) -> None:
        """Pack the weights."""
        self.weight, self.bias = weight, bias
        self._every = self._packed(self.weight, self.bias)
        self._some: tuple[Tensor, FrozenLinear] | None = None
        self._taken: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._cap: float | None = values.get("final_logit_softcapping")
        self._scale: float = (values.get("logit_scale") or 1) / (values.get("logits_scaling") or 1)

    def __call__(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return logits [..., V] of post-norm states, or [..., K] on the given ids.

        A gradient flows to the states where they ask for one, never to the head.
        """
        if hidden.requires_grad:
            logits = F.linear(hidden, *self._plain(ids))
        else:
            logits = (self._every if ids is None else self._on(ids))(hidden)
        if self._scale != 1:
            logits = logits * self._scale
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    def rows(self, ids: Tensor) -> Tensor:
        """Return copies of the weights' rows [K, D]."""
        return self.weight.detach()[ids].clone()

    def _on(self, ids: Tensor) -> FrozenLinear:
        """Return the head on these ids, packed once for as long as the same ids are asked for."""
        if self._some is None or self._some[0] is not ids:
            bias = None if self.bias is None else self.bias[ids]
            self._some = ids, self._packed(self.rows(ids), bias)
        return self._some[1]

    def _plain(self, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias on these ids: packed kernels have no backward."""
        bias = None if self.bias is None else self.bias.detach()
        if ids is None:
            return self.weight.detach(), bias
        if self._taken is None or self._taken[0] is not ids:
            self._taken = ids, self.rows(ids), None if bias is None else bias[ids]
        return self._taken[1:]

    @staticmethod
    def _packed(weight: Tensor, bias: Tensor | None) -> FrozenLinear:
        return FrozenLinear([weight], None if bias is None else [bias])

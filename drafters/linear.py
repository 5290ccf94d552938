"""Linear maps with the kernel that the CPU is fastest with.

Kernels of our own (native.py) read a weight once for all tokens, as panels that it is laid out in.
Where they are missing, and in bfloat16 for many tokens where the processor multiplies it itself,
F.linear serves.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.native import kernels, panels
from drafters.structs import linear_map

Then = Literal["none", "silu", "add", "multiply"]

_AFTER: dict[Then, Callable[[Tensor, Any], Tensor]] = {
    "none": lambda y, _: y,
    "silu": lambda y, _: F.silu(y),
    "add": torch.add,
    "multiply": torch.mul,
}


class FrozenLinear:
    """y = x W^T + b with a weight that never changes.

    What often follows (an activation, a sum, a product) can be had in the same pass over the
    output.

    Args:
        weights: one or several [out, in] matrices of one dtype, stacked along `out`.
        biases: as many [out] vectors, or None.
        pack: whether to lay the weights out for the CPU's kernels where that is possible.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] | None = None,
        *,
        pack: bool = True,
    ) -> None:
        """Stack and lay out."""
        weight = weights[0].detach() if len(weights) == 1 else torch.cat(list(weights)).detach()
        self.bias = None if biases is None else torch.cat(list(biases)).detach()
        self.out_features, self.in_features = weight.shape
        self.kernels = kernels(weight.dtype, weight.device.type) if pack else None
        self.most_tokens = 0 if self.kernels is None else self.kernels.most_tokens
        self.map = None
        if self.kernels is not None:
            laid = panels(_narrowest(weight))
            self.map = linear_map(laid, self.bias, self.in_features, self.out_features)
        self.weight = weight.contiguous() if self.most_tokens < sys.maxsize else None

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return self._run(x, "none", None)

    def silu(self, x: Tensor) -> Tensor:
        """Return the silu of y."""
        return self._run(x, "silu", None)

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """Return y + other; other [..., out]."""
        return self._run(x, "add", other)

    def multiply(self, x: Tensor, other: Tensor) -> Tensor:
        """Return y * other; other [..., out]."""
        return self._run(x, "multiply", other)

    def _run(self, x: Tensor, then: Then, other: Tensor | None) -> Tensor:
        own = self.kernels
        if own is None or x.numel() > self.most_tokens * self.in_features:
            assert self.weight is not None
            return _AFTER[then](F.linear(x, self.weight, self.bias), other)
        assert self.map is not None
        # which the kernels do not ask: they would read what is not theirs
        assert (x.dtype, x.shape[-1]) == (own.dtype, self.in_features)
        other = None if other is None else other.contiguous()
        y = own.linear(x.contiguous(), self.map, then, other)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], self.out_features)


def _narrowest(weight: Tensor) -> Tensor:
    """Return the weight in bfloat16 where that changes no number: half the bytes to read."""
    same = all(torch.equal(part.bfloat16().to(part.dtype), part) for part in weight.split(4096))
    return weight.bfloat16() if same else weight

"""Linear maps with the kernel that the CPU is fastest with.

A few tokens are bound by reading the weights, some more by arithmetic: kernels of our own serve
both (native.py). For many, oneDNN takes over, faster once a weight is packed; the packing operators
are private to torch, so every use is guarded. Where either is missing or refuses, F.linear serves.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.native import kernels

# One packed layout serves any number of rows; packing for one row is slow for more.
_PACKED_FOR_ROWS = 16

Then = Literal["none", "silu", "add", "multiply"]

_ONEDNN = {"none": "none", "silu": "swish", "add": "add", "multiply": "mul"}
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
        pack: whether to pack for the CPU's kernel where that is possible.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] | None = None,
        *,
        pack: bool = True,
    ) -> None:
        """Stack and pack."""
        weight = weights[0].detach() if len(weights) == 1 else torch.cat(list(weights)).detach()
        self.bias = None if biases is None else torch.cat(list(biases)).detach()
        self.out_features, self.in_features = weight.shape
        self.packed = _packed(weight) if pack else None
        self.kernels = kernels(weight.dtype, weight.device.type) if pack else None
        plain = self.packed is None or self.kernels is not None
        self.weight = weight.contiguous() if plain else None
        if self.packed is not None and self.kernels is not None and _fits_bfloat16(weight):
            self.weight = weight.bfloat16()  # the same numbers in half the bytes

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
        own, tokens = self.kernels, x.numel() // self.in_features
        if (
            own is not None
            and x.dtype == own.dtype
            and (self.packed is None or tokens <= own.most_tokens)
        ):
            assert self.weight is not None
            other = None if other is None else other.contiguous()
            y = own.linear(x.contiguous(), self.weight, self.bias, then, other)
            return y if x.ndim == 2 else y.view(*x.shape[:-1], self.out_features)
        if self.packed is None:
            assert self.weight is not None
            return _AFTER[then](F.linear(x, self.weight, self.bias), other)
        if other is None:
            unary = torch.ops.mkldnn._linear_pointwise
            return unary(x, self.packed, self.bias, _ONEDNN[then], [], "")
        binary = torch.ops.mkldnn._linear_pointwise.binary
        return binary(x, other, self.packed, self.bias, _ONEDNN[then])


def _fits_bfloat16(weight: Tensor) -> bool:
    """Tell whether rounding to bfloat16 changes nothing, as with weights published in it."""
    return all(torch.equal(part.bfloat16().to(part.dtype), part) for part in weight.split(4096))


def _packed(weight: Tensor) -> Tensor | None:
    """Return the packed weight, or None where this machine or torch cannot."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
        probe, other = weight.new_ones(1, weight.shape[1]), weight.new_ones(1, weight.shape[0])
        torch.ops.mkldnn._linear_pointwise(probe, packed, None, "swish", [], "")
        torch.ops.mkldnn._linear_pointwise.binary(probe, other, packed, None, "mul")
    except (RuntimeError, AttributeError):
        return None
    return packed

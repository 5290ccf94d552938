"""Linear maps in the layout the CPU's matrix kernel likes best.

oneDNN reads a weight two to four times faster once it is packed; the packing operators are private
to torch, so every use is guarded: where they are missing or refuse, F.linear serves.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# One packed layout serves any number of rows; packing for one row is slow for more.
_PACKED_FOR_ROWS = 16


class FrozenLinear:
    """y = x W^T + b with a weight that never changes.

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
        """Stack and pack; a packed layer keeps no unpacked copy."""
        weight = weights[0].detach() if len(weights) == 1 else torch.cat(list(weights)).detach()
        self.bias = None if biases is None else torch.cat(list(biases)).detach()
        self.out_features, self.in_features = weight.shape
        self.packed = _packed(weight) if pack else None
        self.weight = weight if self.packed is None else None

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        if self.packed is None:
            assert self.weight is not None
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def _packed(weight: Tensor) -> Tensor | None:
    """Return the packed weight, or None where this machine or torch cannot."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
        probe = torch.ones(1, weight.shape[1], dtype=weight.dtype)
        torch.ops.mkldnn._linear_pointwise(probe, packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return None
    return packed

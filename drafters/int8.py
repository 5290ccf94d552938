"""Int8 weights: a target's linear maps in one byte a number, one scale an output row.

Weight-only, by torch's own kernel: each token's output depends on that token alone, so trees,
chains and batches agree as they do in full precision. Embeddings, norms and the head stay as they
are. It is another target than the one it was made from: its outputs are its own.
"""

from typing import Any

import torch
from torch import Tensor, nn

from drafters.errors import UserError

INT8 = "int8"
_LARGEST = 127


class Int8Linear(nn.Module):
    """y = x (s W)^T + b with W int8 [out, in] and s [out].

    Args:
        linear: the map that is rounded, to nearest, by its rows' largest numbers.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        """Round the weights."""
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.float().abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
        rounded = (weight.float() / scale[:, None]).round().clamp(-_LARGEST, _LARGEST)
        self.register_buffer("weight", rounded.to(torch.int8))
        self.register_buffer("scale", scale.to(weight.dtype))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        flat = x.reshape(-1, x.shape[-1])
        y = torch.ops.aten._weight_int8pack_mm(flat, self.weight, self.scale).view(
            *x.shape[:-1], -1
        )
        return y if self.bias is None else y + self.bias


def to_int8(model: Any) -> None:
    """Round every linear map of a causal LM's body in place, and note it in its config.

    Raises:
        UserError: on a device that torch's kernel does not serve, or if there is nothing to round.
    """
    if model.device.type != "cpu":
        raise UserError(f"weights=int8 runs on CPUs; the target is on {model.device}: leave it out")
    body = model.base_model
    maps = [
        (parent, name, child)
        for parent in body.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    if not maps:
        raise UserError(
            f"weights=int8: {type(model).__name__} has no plain linear map: leave it out"
        )
    for parent, name, child in maps:
        setattr(parent, name, Int8Linear(child))
    model.config.quantization_config = {"quant_method": INT8, "weights": "per row"}


def quantisation(config: Any) -> str:
    """Return how a config says its model is quantised, such as "gptq"; "" if it is not."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return ""
    values = found if isinstance(found, dict) else found.to_dict()
    method = values.get("quant_method", "an unnamed method")
    return str(getattr(method, "value", method))

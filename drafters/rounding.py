"""Rounding: what a drafter is once it is published in a narrower dtype.

Masters are trained in float32. What is measured, published and served are their bfloat16 numbers,
so training's figures are those of the folder that decodes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def rounded(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Hold a module's parameters at numbers of this dtype; inside, nothing may be trained."""
    masters = {name: p.detach().clone() for name, p in module.named_parameters()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.to(dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(masters[name])

"""Processes: what the processes of one run must agree on."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor


class Processes:
    """Sums and decisions over all processes.

    Args:
        accelerator: of the run.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        """Keep the accelerator."""
        self.accelerator = accelerator

    def summed(self, value: Tensor) -> Tensor:
        """Return the sum over all processes, on all of them."""
        reduced: Any = self.accelerator.reduce(value, "sum")
        return reduced

    def first(self, value: float) -> float:
        """Return the first process's value on all of them."""
        mine = value if self.accelerator.is_main_process else 0.0
        return self._total(mine)

    def any(self, asked: bool) -> bool:
        """Tell whether any process asks."""
        return bool(self._total(float(asked)))

    def _total(self, value: float) -> float:
        if self.accelerator.num_processes == 1:
            return value
        return float(self.summed(torch.tensor(value, device=self.accelerator.device)))

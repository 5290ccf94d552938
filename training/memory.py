"""Memory: what a training step holds, counted tensor by tensor, whatever the machine.

Counts what torch makes while it is on, forward and backward: weights and batch are not part of it,
nor is what a fused kernel needs inside. Resident memory would hide both behind the allocator.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.features import Lesson
from training.objective import Objective


class LiveTensors(TorchDispatchMode):
    """Counts tensors that are alive, while it is on.

    Args:
        live, peak: bytes now, and at most so far.
        largest: shape of the largest tensor so far.
    """

    def __init__(self) -> None:
        """Start without any."""
        super().__init__()
        self.live = self.peak = self._most = 0
        self.largest: tuple[int, ...] = ()
        self._known: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count what it made."""
        for given in tree_leaves((args, kwargs)):
            self._see(given, made=False)
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            self._see(made, made=True)
        return result

    def _see(self, value: object, *, made: bool) -> None:
        if not isinstance(value, Tensor):
            return
        storage = value.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes() if made else 0
        self._known[key] = weakref.finalize(storage, self._forget, key, size)
        self.live += size
        self.peak = max(self.peak, self.live)
        if size > self._most:
            self._most, self.largest = size, tuple(value.shape)

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size


def step_memory(objective: Objective, lesson: Lesson) -> LiveTensors:
    """Learn from a lesson once and count; gradients are dropped, weights stay as they are."""
    with LiveTensors() as counted:
        objective(lesson).loss.sum().backward()
    objective.zero_grad(set_to_none=True)
    torch.clear_autocast_cache()
    return counted

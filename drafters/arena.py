"""Memory for what is read once a step: in huge pages, where the system has them.

A step reads every weight, and with pages of 4 KiB the processor spends a tenth of that looking
addresses up. Tensors share large pieces, because a huge page (2 MiB) that is begun is used whole.
"""

import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

_PIECE = 32 * 2**20  # bytes
_ALIGNED = 64  # bytes: a line of the caches


class Arena:
    """Cuts tensors from pieces of memory; a piece is freed with the last of its tensors."""

    def __init__(self) -> None:
        """Start without a piece."""
        self._free = torch.empty(0, dtype=torch.uint8)
        self._lock = Lock()

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return zeros on the CPU."""
        size = torch.Size(shape).numel() * dtype.itemsize
        taken = -(-size // _ALIGNED) * _ALIGNED
        with self._lock:
            if taken > _PIECE // 4:  # a piece of its own
                return _piece(taken)[:size].view(dtype).view(shape)
            if taken > len(self._free):
                self._free = _piece(_PIECE)
            found, self._free = self._free[:size], self._free[taken:]
        return found.view(dtype).view(shape)


def _piece(size: int) -> Tensor:
    """Return so many bytes, all zero."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


ARENA = Arena()

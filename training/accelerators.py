"""Accelerators: what makers say of GPUs, for plans on paper. Nothing here was measured by us."""

from dataclasses import dataclass

from drafters.errors import UserError


@dataclass(frozen=True)
class Accelerator:
    """A GPU by its data sheet.

    Args:
        memory: bytes.
        flops: dense bfloat16 operations a second, without sparsity.
        bandwidth: bytes a second of its memory.
    """

    memory: float
    flops: float
    bandwidth: float


ACCELERATORS = {
    "rtx4090": Accelerator(24e9, 165e12, 1.01e12),
    "l40s": Accelerator(48e9, 362e12, 0.864e12),
    "a100": Accelerator(80e9, 312e12, 2.04e12),
    "h100": Accelerator(80e9, 989e12, 3.35e12),
    "h200": Accelerator(141e9, 989e12, 4.8e12),
    "b200": Accelerator(180e9, 2250e12, 7.7e12),
}


def accelerator(name: str) -> Accelerator:
    """Return a GPU.

    Raises:
        UserError: if there is none of that name.
    """
    if name not in ACCELERATORS:
        raise UserError(f"gpu is {name!r}: give {', '.join(ACCELERATORS)}")
    return ACCELERATORS[name]

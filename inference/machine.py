"""Machine: where figures were measured, and with which versions."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("specdrafters", "torch", "transformers", "tokenizers", "numpy", "scipy")


def machine() -> dict[str, Any]:
    """Return what a reader needs to judge absolute figures: processor, threads, memory, GPU."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(pages / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that figures depend on."""
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in _PACKAGES
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

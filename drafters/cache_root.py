"""The folder of everything that is made once a machine: targets, kernels, measured costs."""

import os
from pathlib import Path


def cache_root() -> Path:
    """Return the folder; `DRAFTERS_CACHE` moves it."""
    root = os.environ.get("DRAFTERS_CACHE") or "~/.cache/drafters"
    return Path(root).expanduser().resolve()

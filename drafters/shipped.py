"""Drafters that come with the library, found by the target they were made for."""

from pathlib import Path

from drafters.fingerprint import Fingerprint
from drafters.settings import configs_dir
from drafters.stored import CONFIG, StoredDrafter
from drafters.target import Target


def shipped_for(target: Target, place: Path | None = None) -> Path | None:
    """Return the folder of the drafter that ships for a target, None if there is none.

    Args:
        target: whose fingerprint must be the one that the drafter was trained on.
        place: folder of drafters' folders; None: the library's own.
    """
    here = Fingerprint.of(target)
    for config in sorted((place or configs_dir() / "shipped").glob(f"*/{CONFIG}")):
        if StoredDrafter.read(config.parent).made_for.difference(here) is None:
            return config.parent
    return None

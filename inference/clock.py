"""Clock: seconds of decoding by phase, and the time once a device has done what it was given."""

import time
from dataclasses import dataclass

import torch


@dataclass
class Clock:
    """Seconds spent decoding (prefill apart), by phase.

    draft: proposing, the drafter's own encoding included; build: laying trees out; verify: the
    target's forward; commit: laws, verdicts, stops, cache and bookkeeping.
    """

    prefill: float = 0.0
    draft: float = 0.0
    build: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    rounds: int = 0

    @property
    def phases(self) -> dict[str, float]:
        """Return the seconds of rounds by phase."""
        return {
            "draft": self.draft,
            "build": self.build,
            "verify": self.verify,
            "commit": self.commit,
        }

    @property
    def decode(self) -> float:
        """Return the seconds of all rounds."""
        return self.draft + self.build + self.verify + self.commit


def now(device: torch.device) -> float:
    """Return the time in seconds once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

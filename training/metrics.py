"""Metrics: from sums of the loss to the names that trackers get (listed in tracking.py)."""

import math

import psutil
import torch
from torch import Tensor

from drafters.losses import LossSums
from training.features import Lessons
from training.objective import Objective


class Window:
    """Sums over the steps since the last line.

    Args:
        first: depth of the sums' first entry.
    """

    def __init__(self, first: int = 1) -> None:
        """Start empty."""
        self.first = first
        self.total: Tensor | None = None
        self.tokens, self.seconds, self.rate = 0, 0.0, 0.0

    def add(self, total: Tensor | None, tokens: int, seconds: float, rate: float) -> None:
        """Add a step that took so long; total None: one that was skipped."""
        if total is not None:
            self.total = total if self.total is None else self.total + total
        self.tokens += tokens
        self.seconds += seconds
        self.rate = rate

    def read(self) -> dict[str, float]:
        """Return the metrics and start afresh."""
        speed = self.tokens / max(self.seconds, 1e-9)
        metrics = {"learning_rate": self.rate, "tokens_per_second": speed}
        if self.total is not None:
            sums = metrics_of(LossSums(*self.total), self.first)
            metrics |= {f"train/{k}": v for k, v in sums.items() if "overlap" not in k}
        self.__init__(self.first)
        return metrics


def metrics_of(sums: LossSums, first: int = 1) -> dict[str, float]:
    """Return loss, and agreement and overlap by depth, of sums whose first entry has this depth.

    Depth 0 is the law of a target that learns along, against the frozen one's.
    """
    metrics = {"loss": float(sums.loss.sum() / sums.weight.sum().clamp_min(1e-12))}
    counts = sums.counted.clamp_min(1.0)
    for name, values in (("agreement", sums.agreement), ("overlap", sums.alpha)):
        shares = (values / counts).tolist()
        for depth, share in enumerate(shares, start=first):
            metrics[f"{name}/{depth}" if depth else f"target_{name}"] = share
    return metrics


def line(step: int, share: float, metrics: dict[str, float]) -> str:
    """Return one line for a person."""
    agreement = [f"{v:.3f}" for k, v in metrics.items() if k.startswith("agreement/")]
    parts = [f"step {step} ({share:.0%})", f"loss {metrics.get('loss', math.nan):.3f}"]
    parts.append(f"agreement {' '.join(agreement)}")
    if "target_agreement" in metrics:
        parts.append(f"of the target with the frozen one {metrics['target_agreement']:.3f}")
    if "tau" in metrics:
        parts.append(f"tau {metrics['tau']:.3f}")
    for name in (key.removesuffix("/low") for key in metrics if key.endswith("/low")):
        ends = f"[{metrics[f'{name}/low']:.2f}, {metrics[f'{name}/high']:.2f}]"
        parts.append(f"at T={name.removeprefix('tau/')} {metrics[name]:.3f} {ends}")
    return ", ".join(parts)


def memory_held(device: torch.device) -> float:
    """Return GiB that this process holds, on an accelerator the most it has held there so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return psutil.Process().memory_info().rss / 2**30


@torch.no_grad()
def held_out_metrics(objective: Objective, lessons: Lessons) -> dict[str, float]:
    """Return loss, agreement and overlap on lessons that are not learned from."""
    total: Tensor | None = None
    for index in range(len(lessons)):
        part = torch.stack(list(objective(lessons[index])))
        total = part if total is None else total + part
    return {} if total is None else metrics_of(LossSums(*total), objective.first_depth)

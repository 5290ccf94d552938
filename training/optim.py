"""The optimizer and the learning rate as a function of how far the run is."""

import math

import torch
from torch import nn

from drafters.errors import UserError
from training.options import OptimSettings, ScheduleSettings


def make_optimizer(module: nn.Module, settings: OptimSettings) -> torch.optim.AdamW:
    """Make AdamW over a module's trainable parameters.

    Matrices are decayed, vectors (norms, biases) are not. Every group carries its peak rate. What
    is scaled by 0 is frozen: its gradient is not even computed.

    Raises:
        UserError: if a key of lr_scale names no parameter, or nothing is left to train.
    """
    unused = set(settings.lr_scale)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    names: list[str] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        names.append(name)
        scale = 1.0
        for prefix in (p for p in settings.lr_scale if name.startswith(p)):
            unused.discard(prefix)
            scale *= settings.lr_scale[prefix]
        if scale == 0:
            parameter.requires_grad_(False)
            continue
        decay = settings.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((scale, decay), []).append(parameter)
    if unused:
        first = sorted({name.partition(".")[0] for name in names})
        raise UserError(
            f"optim.lr_scale has {sorted(unused)}, but no parameter's name starts so: they start "
            f"with {', '.join(first)}"
        )
    if not groups:
        raise UserError(f"optim.lr_scale {settings.lr_scale} freezes all parameters: leave some")
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": decay, "peak": settings.lr * scale}
            for (scale, decay), parameters in groups.items()
        ],
        lr=settings.lr,
        betas=(settings.betas[0], settings.betas[1]),
        eps=settings.eps,
        fused=True,
    )


def set_rate(optimizer: torch.optim.Optimizer, share: float) -> float:
    """Set every group to a share of its peak; return the first group's rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * share
    return optimizer.param_groups[0]["lr"]


def rate_at(progress: float, settings: ScheduleSettings) -> float:
    """Return the learning rate as a share of its peak.

    Args:
        progress: share of the run that is done, 0 to 1.
        settings: kind, warm-up and floor.

    >>> [round(rate_at(x, ScheduleSettings(warmup=0.1)), 2) for x in (0.0, 0.05, 0.1, 0.55, 1.0)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if progress < settings.warmup:
        return progress / settings.warmup
    if settings.kind == "constant":
        return 1.0
    done = min(1.0, (progress - settings.warmup) / (1 - settings.warmup))
    shape = 1 - done if settings.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.floor + (1 - settings.floor) * shape

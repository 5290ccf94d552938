"""Replicas: a run's objective on all its processes, whole on each (DDP) or in shares (FSDP 2).

In shares every process keeps a part of each weight, gradient and moment; the weights are gathered
for as long as a step takes. What measures, saves or publishes gets the drafter in one piece, on the
first process; all processes take part in putting it together.
"""

import os
from collections.abc import Mapping
from copy import deepcopy

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from drafters.losses import LossSums
from training.features import Lesson
from training.objective import Objective
from training.options import TrainSettings

Moments = Mapping[Tensor, Mapping[str, Tensor]]


def in_shares(accelerator: Accelerator) -> bool:
    """Tell whether the config that a run was launched with asks for FSDP."""
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return asked and accelerator.num_processes > 1


def gathered(value: Tensor) -> Tensor:
    """Return a tensor in one piece; all processes must ask for it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class Replicas:
    """An objective as it is trained.

    Args:
        objective: on this process's device, its drafter with the weights to start from.
        optimizer: over the drafter's parameters; its own are exchanged for the shares.
        accelerator: of the run.
        settings: of the run.

    Raises:
        UserError: if something is asked for that needs a whole drafter on every process.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        accelerator: Accelerator,
        settings: TrainSettings,
    ) -> None:
        """Wrap it, or cut it into shares."""
        self.objective, self.optimizer, self.accelerator = objective, optimizer, accelerator
        self._copy: Objective | None = None
        self.module: nn.Module = objective
        self.shared = in_shares(accelerator)
        if not self.shared:
            self.module = accelerator.prepare_model(objective)
            return
        settings.refuse(
            ("on_policy.share", "adapter.rank"),
            "which needs the whole drafter on every process, and under FSDP there are shares: "
            "leave it at 0, or launch without FSDP",
        )
        if accelerator.is_main_process:
            drafter = deepcopy(objective.drafter)
            self._copy = Objective(
                drafter, objective.target, objective.settings, objective.drafting
            )
        before = dict(objective.named_parameters())
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        fully_shard(objective, mesh=mesh)
        after = dict(objective.named_parameters())
        self._exchange({before[name]: after[name] for name in before})

    def __call__(self, lesson: Lesson, share: float) -> LossSums:
        """Return the sums of a lesson, times `share`, in the run's precision."""
        if not self.shared:
            return self.module(lesson, share)
        with self.accelerator.autocast():
            return self.module(lesson, share)

    def whole(self) -> Objective:
        """Return the objective with the drafter in one piece; on the first process if in shares."""
        if not self.shared:
            return self.objective
        whole = self._copy or self.objective
        for mine, share in zip(
            whole.drafter.parameters(), self.objective.drafter.parameters(), strict=True
        ):
            value = gathered(share.detach())
            if whole is self._copy:
                mine.detach().copy_(value)
        whole.progress = self.objective.progress
        return whole

    def moments(self) -> Moments:
        """Return the optimizer's moments in one piece, by the parameters of `whole`.

        In shares they come to the first process's memory; the others get none.
        """
        if not self.shared:
            return self.optimizer.state
        found: dict[Tensor, dict[str, Tensor]] = {}
        whole = self._copy or self.objective
        for mine, share in zip(
            whole.drafter.parameters(), self.objective.drafter.parameters(), strict=True
        ):
            for key, value in self.optimizer.state.get(share, {}).items():
                one = gathered(value)
                if whole is self._copy:
                    found.setdefault(mine, {})[key] = one.cpu()
        return found

    def _exchange(self, shares: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Let the optimizer go on with the shares, and with its shares of the moments."""
        for group in self.optimizer.param_groups:
            group["params"] = [shares[parameter] for parameter in group["params"]]
        for parameter, share in shares.items():
            if parameter in self.optimizer.state:
                state = self.optimizer.state.pop(parameter)
                self.optimizer.state[share] = {k: _cut(v, share) for k, v in state.items()}


def _cut(value: Tensor, share: nn.Parameter) -> Tensor:
    """Return this process's share of a moment; the number of steps stays as it is."""
    data = share.data
    if not value.ndim or not isinstance(data, DTensor):
        return value
    return distribute_tensor(value, data.device_mesh, data.placements)

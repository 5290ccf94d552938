"""The sections of a training run's settings that are about its target."""

import re
from dataclasses import dataclass, field
from typing import Any

from drafters.errors import UserError
from drafters.spread import PLANS
from training.ranges import at_least

_SIZE = r"\d+(\.\d+)? ?[KMG]i?B|\d+"


@dataclass
class SpreadSettings:
    """A target whose layers do not all lie beside the drafter; every process holds one of its own.

    Args:
        device_map: auto, balanced, balanced_low_0 or sequential, a plan of accelerate's; or devices
            by module name, such as {model.layers.0: 1}. Embedding and head are beside the drafter
            anyway, as copies. Empty: all of the target is there.
        max_memory: what a plan takes of each device, such as {1: 70GiB, 2: 70GiB}; what does not
            fit there stays on the disk.
        offload_folder: takes a copy of what stays on the disk where a checkpoint stores it
            otherwise than it is computed with (mixtures).
    """

    device_map: Any = ""
    max_memory: dict[str, str] = field(default_factory=dict)
    offload_folder: str = ""

    def __post_init__(self) -> None:
        """Check that a map is one, and that a plan leaves room."""
        given, plan = self.device_map, isinstance(self.device_map, str)
        if given and not (given in PLANS if plan else _is_map(given)):
            raise UserError(
                f"spread.device_map is {given!r}: give {', '.join(PLANS)}, or devices by module "
                "name, such as {model.layers.0: 1}"
            )
        for name in ("max_memory", "offload_folder"):
            if getattr(self, name) and not given:
                raise UserError(f"spread.{name} belongs to spread.device_map: give such as auto")
        for device, size in self.max_memory.items():
            if re.fullmatch(_SIZE, size) is None:
                raise UserError(
                    f"spread.max_memory is {size!r} for device {device}: give such as 70GiB"
                )
        if plan and given and not self.max_memory:
            raise UserError(
                f"spread.device_map is {given}, a plan that takes what is free: the drafter and "
                "its batches need room too, so give spread.max_memory, such as {1: 70GiB, 2: 70GiB}"
            )

    def arguments(self) -> dict[str, Any]:
        """Return what Target.load takes."""
        sizes = {_number(device): _number(size) for device, size in self.max_memory.items()}
        return {
            "device_map": self.device_map,
            "max_memory": sizes or None,
            "offload_folder": self.offload_folder or None,
        }


@dataclass
class AdapterSettings:
    """An adapter (LoRA, by peft) of the target, trained with the drafter and published with it.

    The target that decides is then another one, base and adapter together.

    Args:
        rank: of the updates beside every linear map of the target's layers; 0: no adapter.
        alpha: an update is scaled by it over the rank.
        dropout: of what the updates read, in training.
        drafting: weight of the drafter's loss beside 1 for the KL that holds the adapted target's
            own law to the frozen one's (Medusa-2's lambda_0).
    """

    rank: int = 0
    alpha: int = 16
    dropout: float = 0.05
    drafting: float = 0.2

    def __post_init__(self) -> None:
        """Check the ranges."""
        at_least(0, "adapter.rank", self.rank)
        at_least(1, "adapter.alpha", self.alpha)
        if not 0 <= self.dropout < 1:
            raise UserError(f"adapter.dropout is {self.dropout}: give 0 or more, below 1")
        if self.drafting <= 0:
            raise UserError(f"adapter.drafting is {self.drafting}: give more than 0")


def _is_map(value: Any) -> bool:
    """Tell whether this is a mapping from names to devices."""
    return isinstance(value, dict) and all(isinstance(x, str | int) for x in value.values())


def _number(text: str) -> str | int:
    return int(text) if text.isdigit() else text

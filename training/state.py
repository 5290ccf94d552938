"""State: all that a stopped run needs to go on as if it had never stopped.

One safetensors file, replaced in one step: the drafter's weights, AdamW's moments, every process's
generator, and in its header the progress and the settings that a resumed run must share. Nothing
in it can run code.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drafters.errors import UserError
from drafters.whole import whole_file

STATE = "state.safetensors"


@dataclass
class Progress:
    """How far a run is.

    Args:
        step: optimizer steps done, skipped ones included.
        epoch: current pass over the batches.
        place: batches of it that are done, over all processes.
        elapsed: seconds of the training loop.
        skipped: steps without a finite gradient or without anything to learn.
        best_tau: of the published best drafter; below 0 before the first evaluation.
    """

    step: int = 0
    epoch: int = 0
    place: int = 0
    elapsed: float = 0.0
    skipped: int = 0
    best_tau: float = -1.0


def save_state(
    file: Path,
    module: nn.Module,
    state: Mapping[Tensor, Mapping[str, Tensor]],
    progress: Progress,
    identity: Mapping[str, Any],
    generators: Sequence[Tensor],
) -> None:
    """Write the state; a kill leaves the earlier one or this one, never a part.

    Args:
        file: replaced; its folder is made.
        module: whose state_dict is kept.
        state: the optimizer's moments, by the module's parameters.
        progress: as of now.
        identity: settings and data that a resumed run must share, as plain values.
        generators: torch's generator state of every process.
    """
    tensors = {f"module.{name}": t.detach() for name, t in module.state_dict().items()}
    for name, parameter in _trained(module):
        moments = state.get(parameter, {})
        tensors |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
    tensors |= {f"generator.{rank}": coins for rank, coins in enumerate(generators)}
    header = {"progress": json.dumps(asdict(progress)), "identity": json.dumps(identity)}
    with whole_file(file) as new:
        save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, new, metadata=header)


def load_state(
    file: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: Mapping[str, Any],
    rank: int = 0,
) -> Progress:
    """Put a state back into a module, its optimizer and this process's generator.

    Raises:
        UserError: not readable, or of a run with other settings or data; names the difference.
    """
    try:
        with safe_open(file, "pt") as stored:
            header = stored.metadata()
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        progress = Progress(**json.loads(header["progress"]))
        before = json.loads(header["identity"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file}: not a state this version can go on from ({error}); start afresh in another "
            "folder"
        ) from error
    _check_same(file, before, json.loads(json.dumps(identity)))
    module.load_state_dict(_under("module.", tensors))
    for name, parameter in _trained(module):
        moments = _under(f"optimizer.{name}.", tensors)
        if moments:
            optimizer.state[parameter] = {k: v.to(parameter.device) for k, v in moments.items()}
    generator = tensors.get(f"generator.{rank}")
    if generator is not None:
        torch.set_rng_state(generator)
    return progress


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _check_same(file: Path, before: object, now: object, name: str = "") -> None:
    """Refuse the first difference between two nested identities."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(set(before) | set(now)):
            inner = f"{name}.{key}" if name else str(key)
            _check_same(file, before.get(key), now.get(key), inner)
    elif before != now:
        raise UserError(
            f"{file}: that run has {name} = {before}, this one {now}: give the same, or another "
            "output folder"
        )

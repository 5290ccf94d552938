r"""Measure what one training step of a drafter holds, by the length of its text.

    T=$(python scripts/fetch_target.py)
    python scripts/measure_memory.py eagle --config configs/drafters/eagle3.yaml target=$T \
        --lengths 256,1024,4096 --vary drafter.unroll=1,3,7
    python scripts/measure_memory.py eagle --config configs/smoke/eagle.yaml target=$T \
        --lengths 64,128

Peak bytes of the tensors that a forward and backward pass makes over one row of random tokens;
weights, gradients, moments and the batch are not part of it (--dry-run of a training command
counts those). The table goes to stdout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from console import app, progress, run
from drafters.base import NeuralDrafter
from drafters.errors import UserError
from drafters.registry import build_drafter
from drafters.settings import find_config, load
from drafters.target import Target
from training.commandline import Screen
from training.examples import Example
from training.features import Lessons
from training.memory import LiveTensors, step_memory
from training.objective import Objective
from training.options import TrainSettings

cli = app(__doc__ or "")

_LONGEST = 2**20


@cli.command()
def measure_memory(
    family: Annotated[str, typer.Argument(help="Drafter family.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings of a training run.")] = None,
    lengths: Annotated[
        str, typer.Option(help="Tokens of the row.")
    ] = "256,512,1024,2048,4096,8192",
    vary: Annotated[
        str, typer.Option(help="A setting and its values, such as drafter.unroll=1,3,7.")
    ] = "seed=0",
) -> None:
    """Measure what one training step of a drafter holds, by the length of its text."""
    key, _, values = vary.partition("=")
    if not values:
        raise UserError(f"--vary is {vary!r}: give KEY=VALUE,VALUE")
    sizes = _sizes(lengths)
    files = [] if config is None else [find_config(config)]
    base = ["output=unused", "data.path=unused", *(overrides or [])]
    runs = [load(TrainSettings, files, [*base, f"{key}={value}"]) for value in values.split(",")]
    target = Target.load(runs[0].target, dtype=runs[0].target_dtype)
    columns: list[list[LiveTensors]] = []
    with progress() as bars:
        task = bars.add_task("lengths", total=len(runs) * len(sizes))
        for settings in runs:
            objective = Objective(_drafter(family, settings, target), target, settings.loss)
            columns.append([])
            for size in sizes:
                columns[-1].append(_measured(objective, settings, size))
                bars.advance(task)
    table = Table("tokens", *values.split(","), "largest tensor", title=key)
    for row, size in enumerate(sizes):
        found = [column[row] for column in columns]
        shape = " x ".join(map(str, found[-1].largest))
        table.add_row(str(size), *(f"{x.peak / 2**20:.1f} MiB" for x in found), shape)
    Screen(soft_wrap=True).print(table)


def _drafter(family: str, settings: TrainSettings, target: Target) -> NeuralDrafter:
    torch.manual_seed(settings.seed)
    drafter = build_drafter(family, settings.drafter, target.shape)
    if not isinstance(drafter, NeuralDrafter):
        raise UserError(f"drafter {family} has no weights to train")
    drafter.init_from(target)
    return drafter


def _measured(objective: Objective, settings: TrainSettings, size: int) -> LiveTensors:
    """Learn once from one row of random tokens."""
    target = objective.target
    ids = torch.randint(target.shape.vocab_size, (size,))
    example = Example("random", ids, torch.ones(size, dtype=torch.bool))
    lessons = Lessons(
        [example],
        [[0]],
        target=target,
        features=objective.drafter.features,
        settings=settings.features,
        loss=settings.loss,
    )
    return step_memory(objective, lessons.lesson_of([example]))


def _sizes(text: str) -> list[int]:
    if not all(part.isdecimal() and 1 < int(part) <= _LONGEST for part in text.split(",")):
        raise UserError(
            f"--lengths is {text!r}: give numbers of tokens up to {_LONGEST}, such as 256,1024"
        )
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    run(cli)

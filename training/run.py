"""run: what every training/train_*.py does, from the command line to the published drafter.

A mistake of the user is one line and exit code 2 here too.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from transformers.utils import logging as transformers_logging

from drafters.base import NeuralDrafter
from drafters.errors import UserError
from drafters.settings import find_config, load, to_yaml
from drafters.whole import check_place, write_text
from inference import Output
from training import acceptance, tracking
from training.commandline import dressed, empty, ended, note, stderr
from training.estimate import estimate
from training.joint import served_by, served_from
from training.options import TrainSettings
from training.parts import Parts, prepare
from training.samples import FIGURES, MARKED, benchmark_prompts, benchmark_rows, sample_rows
from training.state import STATE
from training.trainer import Run, Trainer

_SETTINGS = "settings.yaml"


def main(method: str, config: str, about: str | None) -> NoReturn:
    """Run the command of one family and end the process.

    Exit codes: 0 done, 2 the user's mistake (one line), 128 + n stopped by signal n.

    Args:
        method: name of the drafter family.
        config: the project's own config that serves unless --config gives another.
        about: the help, before all settings and their defaults.
    """
    defaults = f"Settings (give section.key=value):\n{to_yaml(TrainSettings())}"
    cli = empty(f"{(about or '').strip()}\n\n{defaults}")

    @cli.command()
    def train(
        overrides: Annotated[
            list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")
        ] = None,
        config: Annotated[Path, typer.Option(help="Settings as YAML.")] = Path(config),
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Say what would be trained, and stop.")
        ] = False,
    ) -> int:
        settings = load(TrainSettings, [find_config(config)], overrides or [])
        return _train(method, settings, dry_run=dry_run)

    sys.exit(ended(dressed(cli)))


def _train(method: str, settings: TrainSettings, *, dry_run: bool) -> int:
    output = Path(settings.output)
    if not dry_run:
        check_place(output, folder=True)
    if not dry_run and not settings.resume and (output / STATE).exists():
        raise UserError(
            f"{output} holds a run already: set resume=true to go on with it, or give another "
            "output folder"
        )
    if not stderr.is_terminal:
        transformers_logging.disable_progress_bar()
    prompts = benchmark_prompts(settings)
    parts = prepare(method, settings)
    main_process = parts.accelerator.is_main_process
    for line in parts.notes if main_process else []:
        note(line)
    if dry_run:
        if main_process:
            typer.echo(_described(parts))
        return 0
    if main_process:
        write_text(output / _SETTINGS, to_yaml(parts.settings))
    parts.accelerator.wait_for_everyone()
    tracking.start(parts.accelerator, settings.tracking, output, dataclasses.asdict(parts.settings))
    published = output / ("best" if settings.evaluate.times else "last")
    received, step = _run(parts)
    if prompts and main_process and received is None:
        target = served_from(published, parts.objective.target)
        rows = benchmark_rows(target, published, prompts, parts.settings)
        tracking.log_table(parts.accelerator, "benchmark", FIGURES, rows, step)
    parts.accelerator.end_training()
    if not main_process:
        return 0
    if received is not None:
        note(f"stopped by signal {received}; resume=true goes on")
        return 128 + received
    typer.echo(str(published))
    return 0


def _run(parts: Parts) -> tuple[int | None, int]:
    """Train, with a bar where there is a terminal.

    Returns:
        The signal that ended it, if any, and the steps done.
    """
    objective, settings = parts.objective, parts.settings

    def measured(drafter: NeuralDrafter) -> dict[str, float]:
        seen: list[Output] = []
        found = acceptance.measure(
            served_by(drafter, objective.target),
            drafter,
            parts.prompts,
            settings.evaluate,
            settings.seed,
            seen.append,
        )
        rows = sample_rows(seen, objective.target)
        tracking.log_table(parts.accelerator, "samples", MARKED, rows, trainer.progress.step)
        return found

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    quiet = not (stderr.is_terminal and parts.accelerator.is_main_process)
    with Progress(*columns, TimeRemainingColumn(), console=stderr, disable=quiet) as bar:
        task = bar.add_task("training", total=1.0)
        run = Run(
            objective,
            parts.lessons,
            parts.held_out,
            measured if parts.prompts else None,
            parts.identity,
            note if parts.accelerator.is_main_process else lambda _: None,
            lambda share: bar.update(task, completed=share),
        )
        trainer = Trainer(run, settings, parts.accelerator)
        return trainer.train(), trainer.progress.step


def _described(parts: Parts) -> str:
    """Return the settings, what the run would take, and the first batch, for --dry-run."""
    lesson = parts.lessons[0]
    rows, length = lesson.batch.ids.shape
    supervised = int(lesson.batch.label_mask[:, 1:].sum())
    first = (
        f"first batch: {rows} rows of up to {length} tokens, {lesson.tokens} tokens, {supervised} "
        "supervised"
    )
    return "\n".join([to_yaml(parts.settings).rstrip(), *estimate(parts), first])

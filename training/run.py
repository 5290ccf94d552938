"""run: what every training/train_*.py does, from the command line to the published drafter.

A mistake of the user is one line and exit code 2 here too; scripts/console.py does the same for
scripts, which training may not import.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from transformers.utils import logging as transformers_logging

from drafters.base import NeuralDrafter
from drafters.errors import UserError
from drafters.settings import find_config, load, to_yaml
from drafters.whole import write_text
from training import acceptance, tracking
from training.estimate import estimate
from training.options import TrainSettings
from training.parts import Parts, prepare
from training.state import STATE
from training.trainer import Run, Trainer

# The base of all usage errors: typer carries a click of its own from 0.29 on, imports it before.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]
_SETTINGS = "settings.yaml"
_stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def main(method: str, config: str, summary: str) -> NoReturn:
    """Run the command of one family and end the process.

    Exit codes: 0 done, 2 the user's mistake (one line), 128 + n stopped by signal n.

    Args:
        method: name of the drafter family.
        config: the project's own config that serves unless --config gives another.
        summary: first paragraph of the help.
    """
    defaults = f"\b\nSettings (give section.key=value):\n{to_yaml(TrainSettings())}"
    text = f"{summary}\n\n{defaults}".replace("\n\n", "\n\n\b\n")
    cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @cli.command(help=text)
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

    try:
        code = cli(standalone_mode=False)
    except UserError as error:
        code = _fail(str(error))
    except _UsageError as error:
        code = _fail(f"{error} (see --help)")
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _fail(text: str) -> int:
    if os.environ.get("RANK", "0") == "0":
        _stderr.print(f"error: {' '.join(text.split())}", style="red", markup=False)
    return 2


def _train(method: str, settings: TrainSettings, *, dry_run: bool) -> int:
    output = Path(settings.output)
    if not dry_run and not settings.resume and (output / STATE).exists():
        raise UserError(
            f"{output} holds a run already: set resume=true to go on with it, or give another "
            "output folder"
        )
    if not _stderr.is_terminal:
        transformers_logging.disable_progress_bar()
    parts = prepare(method, settings)
    main_process = parts.accelerator.is_main_process
    for note in parts.notes if main_process else []:
        _say(note)
    if dry_run:
        if main_process:
            typer.echo(_described(parts))
        return 0
    if main_process:
        write_text(output / _SETTINGS, to_yaml(parts.settings))
    parts.accelerator.wait_for_everyone()
    tracking.start(parts.accelerator, settings.tracking, output, dataclasses.asdict(parts.settings))
    received = _run(parts)
    parts.accelerator.end_training()
    if not main_process:
        return 0
    if received is not None:
        _say(f"stopped by signal {received}; resume=true goes on")
        return 128 + received
    typer.echo(str(output / ("best" if settings.evaluate.times else "last")))
    return 0


def _run(parts: Parts) -> int | None:
    """Train, with a bar where there is a terminal; return the signal that ended it, if any."""
    objective, settings = parts.objective, parts.settings

    def measured(drafter: NeuralDrafter) -> acceptance.Acceptance:
        return acceptance.measure(
            objective.target, drafter, parts.prompts, settings.evaluate, settings.seed
        )

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    quiet = not (_stderr.is_terminal and parts.accelerator.is_main_process)
    with Progress(*columns, TimeRemainingColumn(), console=_stderr, disable=quiet) as bar:
        task = bar.add_task("training", total=1.0)
        run = Run(
            objective,
            parts.lessons,
            parts.held_out,
            measured if parts.prompts else None,
            parts.identity,
            _say if parts.accelerator.is_main_process else lambda _: None,
            lambda share: bar.update(task, completed=share),
        )
        return Trainer(run, settings, parts.accelerator).train()


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


def _say(text: str) -> None:
    _stderr.print(text, markup=False)

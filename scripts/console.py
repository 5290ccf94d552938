"""What every script shares: common options, what it warns of, how it shows progress.

`from console import run` works because `python scripts/x.py` puts this folder first on the path.
training/commandline.py has what scripts and training commands share.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from training.commandline import dressed, empty, ended, note, stderr

app = empty


class Dtype(StrEnum):
    """What a target computes in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Engine(StrEnum):
    """Which forward a target runs."""

    fast = "fast"
    reference = "reference"
    static = "static"


class Weights(StrEnum):
    """What a target's linear maps are rounded to."""

    int8 = "int8"


ENGINE_HELP = (
    "fast: lean forward; reference: the model's own; static: fast at fixed shapes, as CUDA graphs "
    "on a GPU. Default: fast where the target allows, else reference."
)
DEVICE_HELP = (
    "Where the target runs, such as cuda:0 or cpu. Default: an accelerator if there is one."
)
WEIGHTS_HELP = (
    "int8: round the target's linear maps to one byte a number. Another target: compare with none "
    "at the same weights."
)
# Unrelated projects on PyPI whose code would lie on our import names.
FOREIGN = ("drafters", "inference")


def run(cli: typer.Typer) -> NoReturn:
    """Run a command line and end the process: 0 done, 2 the user's mistake, 130 interrupted."""
    before = signal.signal(signal.SIGTERM, _terminated)
    warn()
    _quiet_bars()
    try:
        code = ended(dressed(cli))
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.exit(code)


def command_line() -> str:
    """Return the command that started this process, as a shell reads it."""
    script = Path(sys.argv[0])
    name = f"python scripts/{script.name}" if script.suffix == ".py" else script.name
    return shlex.join([*name.split(), *sys.argv[1:]])


def _terminated(number: int, _frame: object) -> NoReturn:
    """End as Ctrl-C does, so that what is half written beside its place is removed."""
    sys.exit(128 + number)


def _quiet_bars() -> None:
    """Leave transformers' bars out where stderr is no terminal, if it is imported at all."""
    if not stderr.is_terminal and "transformers" in sys.modules:
        sys.modules["transformers"].utils.logging.disable_progress_bar()


def warn() -> None:
    """Write a line to stderr for each foreign distribution on our import names."""
    for line in foreign_distributions():
        note(f"warning: {line}")


def _load_plugins(names: list[str] | None) -> None:
    if names:
        from drafters.registry import load_plugin  # torch, which small commands start without

        for name in names:
            load_plugin(name)


EnginesRoot = Annotated[
    Path | None, typer.Option(help="Where the engines were built; default: in the cache.")
]

Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        callback=_load_plugins,
        is_eager=True,
        help="A file or module of yours that registers a drafter; it is imported, so it runs.",
    ),
]


@contextmanager
def progress() -> Iterator[Progress]:
    """Show bars on stderr while the block runs; show nothing where stderr is no terminal."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=stderr,
        disable=not stderr.is_terminal,
    ) as bars:
        yield bars


def foreign_distributions() -> list[str]:
    """Say which other people's distributions are installed on our import names."""
    lines: list[str] = []
    for name in FOREIGN:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        lines.append(
            f"the distribution {name!r} {version} from PyPI is another project that takes our "
            f"import name (ours is 'specdrafters'); remove it: {sys.executable} -m pip "
            f"uninstall {name}, then run `make setup` again"
        )
    return lines

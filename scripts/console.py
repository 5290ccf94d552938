"""What every command line here shares: how it ends, what it warns of, how it shows progress.

`from console import run` works because `python scripts/x.py` puts this folder first on the path.
Results go to stdout; notes, errors and bars go to stderr.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib import metadata
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from drafters.errors import UserError


class Dtype(StrEnum):
    """What a target computes in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Engine(StrEnum):
    """Which forward a target runs."""

    fast = "fast"
    reference = "reference"
    static = "static"


ENGINE_HELP = (
    "fast: lean forward; reference: the model's own; static: fast at fixed shapes, as CUDA graphs "
    "on a GPU. Default: fast where the target allows, else reference."
)
# Unrelated projects on PyPI whose code would lie on our import names.
FOREIGN = ("drafters", "inference")
# The base of all usage errors: typer carries a click of its own from 0.29 on, imports it before.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]

if not sys.stderr.isatty():
    # tqdm reads it on import: no bars of other libraries in logs either.
    os.environ.setdefault("TQDM_DISABLE", "1")

stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def app(summary: str) -> typer.Typer:
    """Return an empty command line; `summary` is the first paragraph of its help."""
    return typer.Typer(
        help=summary, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )


def run(cli: typer.Typer) -> NoReturn:
    """Run a command line and end the process: 0 done, 2 the user's mistake, 130 interrupted."""
    before = signal.signal(signal.SIGTERM, _terminated)
    warn()
    _quiet_bars()
    try:
        code = cli(standalone_mode=False)
    except UserError as error:
        _fail(str(error))
    except _UsageError as error:
        _fail(f"{_message(error)} (see --help)")
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    finally:
        signal.signal(signal.SIGTERM, before)
    if code == 130:
        note("interrupted; what was saved stays")
    sys.exit(code if isinstance(code, int) else 0)


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


def note(text: str) -> None:
    """Write one line to stderr."""
    stderr.print(text, markup=False)


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


def _message(error: Exception) -> str:
    formatted = getattr(error, "format_message", None)
    return (formatted() if formatted else str(error)).rstrip(".")


def _fail(text: str) -> NoReturn:
    # Bare text to a pipe, so that the line can be matched; red for a person.
    stderr.print(f"error: {' '.join(text.split())}", style="red", markup=False)
    sys.exit(2)

r"""Train drafters for speculative decoding, decode with them, and measure what they bring.

    drafters benchmark --help
    T=$(drafters fetch-target)
    drafters generate --target $T --drafter ngram --prompt "Count to twenty."
    drafters train eagle target=$T output=runs/eagle data.path=configs/chats
    drafters train --config_file configs/accelerate/cpus.yaml eagle target=$T output=runs/eagle \
        data.path=configs/chats

Every script is a command of the same name. Paths that start with configs/ are the project's own
where nothing of that name lies in the working folder.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path

import typer

import training
from console import app, run
from drafters.__main__ import run_script
from drafters.errors import UserError
from drafters.settings import own
from training.commandline import kebab

cli = app(__doc__ or "")

_SCRIPTS = Path(__file__).parent
_TRAINING = Path(training.__file__).parent
# the demo's steps are paths in a checkout
_NO_COMMANDS = {"commands", "console"} | ({"demo"} if _SCRIPTS.name == "_scripts" else set())
# what stands behind a command is the script's own business
_WHOLE = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}


def _families() -> dict[str, Path]:
    found = sorted(_TRAINING.glob("train_*.py"))
    return {kebab(file.stem.removeprefix("train_")): file for file in found}


def _about(file: Path) -> str:
    doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0]


def _command(file: Path) -> Callable[[typer.Context], None]:
    def handed_over(context: typer.Context) -> None:
        run_script(file, f"drafters {kebab(file.stem)}", context.args)

    return handed_over


for _file in sorted(_SCRIPTS.glob("*.py")):
    if _file.stem not in _NO_COMMANDS:
        cli.command(
            kebab(_file.stem), help=_about(_file), context_settings=_WHOLE, add_help_option=False
        )(_command(_file))


@cli.command(context_settings=_WHOLE, help="Train a drafter: [ACCELERATE OPTIONS] FAMILY SETTINGS.")
def train(context: typer.Context) -> None:
    """Train in this process, or through accelerate's launcher where options of it are given."""
    families = _families()
    given = [kebab(argument) for argument in context.args]
    family = next((name for name in given if name in families), None)
    if family is None:
        raise UserError(f"no family to train: give one of {', '.join(families)}, then its settings")
    place = given.index(family)
    launcher = [str(own(word)) for word in context.args[:place]]
    settings = context.args[place + 1 :]
    if not launcher:
        run_script(families[family], f"drafters train {family}", settings)
        return
    from accelerate.commands import launch

    parser = launch.launch_command_parser()
    arguments = parser.parse_args([*launcher, str(families[family]), *settings])
    try:
        launch.launch_command(arguments)
    except subprocess.CalledProcessError as error:  # the command has said why
        raise typer.Exit(error.returncode) from None


if __name__ == "__main__":
    run(cli)

"""What the documents say of commands is so: scripts, options, settings, shapes and files exist."""

import re
import runpy
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer

from drafters.settings import find_config, load
from inference.spec import Spec
from tests.blocks import DOCUMENTS, ROOT, Block, blocks, commands, script_of
from tests.files import PAGE, page
from training.commandline import dressed
from training.options import TrainSettings

BLOCKS = [block for file in DOCUMENTS for block in blocks(file)]
# what docker runs spans lines, and is not ours to parse
SHELL = [b for b in BLOCKS if b.language == "sh" and not b.text.startswith("docker")]
OTHER_PROGRAMS = {
    "make",
    "pip",
    "wandb",
    "tensorboard",
    "git",
    "cd",
    "drafters",
    "vllm",
    "source",
    "env",
}


def test_every_block_says_what_it_is() -> None:
    unknown = [str(b) for b in BLOCKS if b.language not in {"sh", "python", "text", "yaml"}]
    assert not unknown
    assert all(b.reason is None or len(b.reason.split()) > 1 for b in BLOCKS)


@cache
def command_of(script: str) -> Any:
    """Return a script's click command without running it."""
    path = ROOT / "scripts" / script
    with patch.object(sys, "path", [str(ROOT / "scripts"), *sys.path]):
        return dressed(runpy.run_path(str(path))["cli"])


def check_settings(arguments: list[str]) -> None:
    files = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--config"]
    given = [word for word in arguments if re.match(r"[a-z_.]+=", word)]
    rest = {"target=T", "output=O", "data.path=D"}
    load(TrainSettings, [find_config(file) for file in files], [*rest, *given])


@pytest.mark.slow
@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_parse(block: Block) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for words in commands(block):
        found = script_of(words)
        if found is None:
            program = words[0]
            if words[:2] == ["python", "-m"]:
                assert find_spec(words[2]) is not None, words
                continue
            assert program in OTHER_PROGRAMS or re.fullmatch(r"[A-Z]+=.*", program), words
            if program == "make":
                assert words[1] in targets, words
            continue
        script, arguments = found
        assert (ROOT / "scripts" / script).is_file(), words
        if script.startswith("../training/"):
            check_settings(arguments)
            continue
        try:
            context = command_of(script).make_context(script, list(arguments))
        except typer.Exit:  # an option such as --list, which ends the command
            continue
        drafters = context.params.get("drafter") or []
        for text in drafters if isinstance(drafters, list | tuple) else [drafters]:
            Spec.parse(str(text).replace("$E", "runs/eagle/best"))
        if "overrides" in context.params and script != "preview_data.py":
            check_settings(arguments)


def test_files_are_listed() -> None:
    """The tree in the README, at the level that it shows: every file there, none that is not."""
    [tree] = [b for b in BLOCKS if b.file.name == "README.md" and "pyproject.toml " in b.text]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    shown: set[str] = set()
    folder = ""
    for line in tree.text.splitlines():
        name, _, comment = line.strip().partition(" ")
        assert comment.strip(), f"{line!r} has no comment"
        folder = name if not line.startswith(" ") and name.endswith("/") else folder
        shown.add(name if not line.startswith(" ") else folder + name)
    opened = {Path(name).parts[0] + "/" for name in shown if len(Path(name).parts) > 1}
    real: set[str] = set()
    for name in listed:
        parts = Path(name).parts
        top = parts[0] + ("/" if len(parts) > 1 else "")
        real.add(top)
        if top in opened:
            real.add(top + parts[1] + ("/" if len(parts) > 2 else ""))
    hidden = {name for name in real if name.startswith(".") or name.endswith("__init__.py")}
    assert shown == real - hidden


@pytest.mark.slow
def test_every_module_is_listed() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python -m tests.files"

"""One style for every command line: help with groups and an example, one line for a mistake."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import Done, run_script

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(p.name for p in (ROOT / "scripts").glob("*.py") if p.name != "console.py")
TRAININGS = sorted(f"../training/{p.name}" for p in (ROOT / "training").glob("train_*.py"))
ALL = [*SCRIPTS, *TRAININGS[:1]]
GROUPS = ["Arguments", "What", "Decoding", "Machine", "Output", "More"]


def plain(monkeypatch: pytest.MonkeyPatch, name: str, *options: str) -> Done:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")  # NO_COLOR wins
    console = sys.modules.get("training.commandline")
    if console is not None:
        monkeypatch.setattr(console, "stderr", console.Console(stderr=True, soft_wrap=True))
    return run_script(name, *options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_help_has_an_example_and_groups(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    told = plain(monkeypatch, name, "--help")
    assert (told.returncode, told.stderr) == (0, "")
    assert "\x1b" not in told.stdout
    shown = {"commands.py": "drafters"}.get(name, Path(name).name)
    _, examples = told.stdout.split(" Examples:", 1)
    assert f"{shown} " in examples
    assert "Show this message and exit." in told.stdout
    groups = [name for name in re.findall(r"╭─ (\w+)", told.stdout) if name in GROUPS]
    assert groups == sorted(groups, key=GROUPS.index)
    assert re.findall(r"│ (--[a-z-]+)", told.stdout.partition("╭─ More")[2]) == ["--help"]


@pytest.mark.parametrize("command", ["speedup", "train"])
def test_help_of_a_command_has_an_example(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    told = plain(monkeypatch, "plan.py", command, "--help").stdout
    assert re.search(rf"Examples:\s+python scripts/plan\.py {command} --", told)


@pytest.mark.parametrize("name", ALL)
def test_a_mistake_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    done = plain(monkeypatch, name, "--no-such-option")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: No such option: --no-such-option")
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("name", [*SCRIPTS, *TRAININGS])
def test_the_help_is_the_docstring(name: str) -> None:
    """Its first paragraph a sentence, its second the examples."""
    source = (ROOT / "scripts" / name).read_text()
    doc = ast.get_docstring(ast.parse(source), clean=False)
    assert doc is not None
    sentence, examples, *_ = doc.split("\n\n")
    assert sentence.endswith((".", "?"))
    assert "\n" not in sentence
    assert examples.startswith("    ")
    assert "__doc__" in source


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "usage", "example"),
    [
        ([], "drafters [OPTIONS]", "drafters benchmark --help"),
        (["plan"], "drafters plan [OPTIONS]", "    drafters plan speedup --alpha"),
        (["train", "eagle"], "drafters train eagle [OPTIONS]", "    drafters train eagle "),
    ],
)
def test_under_the_console_command_help_says_what_is_typed(
    command: list[str], usage: str, example: str
) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "drafters", *command, "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert f"Usage: {usage}" in told
    assert example in told
    assert ".py" not in told.partition("Examples:")[2].partition("╭")[0]

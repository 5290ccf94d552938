"""Wrong values of every option of every command: one line and exit code 2, before any model work.

The options are read from the commands' own declarations, so a new one is tried as soon as it is
there; a new command fails here until LINES holds a line of it that works.
"""

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

import pytest
import torch
import yaml

import training.parts  # noqa: F401 - names subprocess's classes, which are replaced below
from drafters.base import NeuralDrafter
from drafters.checkpoint import save_drafter
from drafters.errors import UserError
from drafters.registry import build_drafter
from drafters.settings import load, to_yaml
from drafters.target import Target
from tests.folders import save_tiny_target
from tests.scripts import SCRIPTS, run_script
from training.commandline import dressed
from training.options import TrainSettings

pytestmark = pytest.mark.slow

CONFIG = SCRIPTS.parent / "configs" / "smoke" / "medusa.yaml"
HUGE = "9" * 30
# By the kind of an option: what none takes.
WRONG = {
    "integer": ["x", "-1", HUGE],
    "float": ["-1", "nan", "inf"],
    "choice": [""],
    "path": ["nowhere", "empty", "binary", "folder", ""],
}
# What some take: no worse than one line.
DOUBTFUL = {
    "integer": ["0", "1000000"],
    "float": ["", "0"],
    "text": ["", "-1", HUGE, "1,", "=", ":", "\udce9", "binary"],
}
NUMBERS = ["x", "-1", "nan", "1,x", "1,"]  # where numbers are given as text

AS_NUMBERS = {"contexts", "lengths", "temperatures", "tokens", "vocabularies", "widths", "rows"}
AS_FOLDERS = {"target", "drafter"}
WRITTEN = {"out", "to"}
BELOW_ZERO = {"seed", "presence_penalty", "frequency_penalty"}
# Paths that may be there or not, and those that only a folder is.
FREE = {("publish", "to"), ("fetch_target", "wheel")}

LINES = {
    "benchmark": "--target T --prompts P --drafter ngram --out O --warmup 0 --repeats 1",
    "compare": "B B",
    "demo": "--quick --out O/demo",
    "doctor": "--target T --drafter D --prompts P",
    "export": "D --out O/new --to medusa",
    "fetch_target": "",
    "generate": "--target T --prompt hello --drafter ngram",
    "gpu_check": "--size tiny --device cpu --out O",
    "make_chats": "--target T --out O/chats --chats 4",
    "measure_memory": "medusa target=T data.path=C --config G --lengths 32",
    "plan speedup": "--benchmark B",
    "plan train": "--target T --method medusa",
    "preview_data": "--target T --data C",
    "publish": "D --to O/published",
    "report": "B --out O/report",
    "search_tree": "--target T --prompts P --drafter D --out O/tree",
    "serve_check": "--target T --drafter D --engine vllm --prompts P",
    "store_features": "medusa target=T data.path=C --config G features.store=O/features",
    "tune": "--target T --prompts P --drafter D --out O --samples 1 --depth 3",
}
NOT_HERE = {"serve_check"}  # refused as it stands: the engines are not built
NO_LINES = {"commands", "console"}


class WorkedError(BaseException):
    """A model is asked, or a process started: the command took what it was given."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Make what LINES names; a command that gets to work ends there."""
    root = tmp_path_factory.mktemp("options")
    names = {key: str(root / key) for key in "TPCDBWO"} | {"G": str(CONFIG)}
    target = Target.load(save_tiny_target(root / "T", num_hidden_layers=4))
    turns = [{"question_id": i, "category": "a", "turns": ["and in the end"]} for i in range(3)]
    (root / "P").write_text("".join(json.dumps(line) + "\n" for line in turns))
    said = [{"role": "user", "content": "a band"}, {"role": "assistant", "content": "the sand"}]
    chats = [{"id": str(i), "messages": said} for i in range(40)]
    (root / "C").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (root / "C").rename(root / "C.jsonl")
    names["C"] += ".jsonl"
    (root / "P").rename(root / "P.jsonl")
    names["P"] += ".jsonl"
    torch.manual_seed(0)
    drafter = build_drafter("medusa", {}, target.shape)
    assert isinstance(drafter, NeuralDrafter)
    save_drafter(drafter, root / "D", target, {"step": 1})
    (root / "empty").touch()
    (root / "binary").write_bytes(bytes(range(256)) * 4)
    (root / "folder").mkdir()
    names |= {name: str(root / name) for name in ("nowhere", "empty", "binary", "folder")}
    names["W"] = names["binary"]
    with pytest.MonkeyPatch.context() as patching:
        patching.chdir(root)
        patching.setenv("DRAFTERS_CACHE", str(root / "cache"))
        line = ["--target", names["T"], "--prompts", names["P"], "--out", names["B"]]
        line += ["--max-new-tokens", "4", "--repeats", "1", "--warmup", "0", "--drafter", "ngram"]
        patching.setattr("inference.bench._COST_SAMPLES", 1)
        done = run_script("benchmark.py", *line, "--no-report")
        assert (Path(names["B"]) / "benchmark.json").exists(), done.stderr
        loading: list[bool] = []
        load = Target.load

        @cache
        def loaded(*given: Any, **named: Any) -> Target:
            loading.append(True)
            try:
                return load(*given, **named)
            finally:
                loading.clear()

        patching.setattr(Target, "load", loaded)
        patching.setattr(torch, "set_num_threads", lambda _: None)
        for name in ("prefill", "run", "forward_batch", "forward_trees"):
            patching.setattr(Target, name, _work(getattr(Target, name), loading))
        for name in ("run", "Popen", "check_call", "check_output"):
            patching.setattr(subprocess, name, _work(getattr(subprocess, name), loading))
        yield names


def _work(real: Any, loading: list[bool]) -> Any:
    """Return what ends a command, but for the test that a target makes of itself."""

    def work(*given: Any, **named: Any) -> Any:
        if loading:
            return real(*given, **named)
        raise WorkedError

    return work


def call(line: str, options: list[str]) -> tuple[str, str]:
    """Return how a command ends (done, failed, refused, worked or BROKEN) and what it says."""
    script, *command = line.split()
    here = Path.cwd()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = run_script(f"{script}.py", *command, *options)
    except WorkedError:
        return "worked", ""
    except Exception as error:
        return "BROKEN", repr(error)[:300]
    finally:
        os.chdir(here)
    lines = done.stderr.splitlines()
    if done.returncode in (0, 1):
        return ("done", "failed")[done.returncode], ""
    whole = done.returncode == 2 and lines and lines[-1].startswith("error: ")
    alone = sum(line.startswith(("error", "Traceback", "  File")) for line in lines) == 1
    return "refused" if whole and alone and not done.stdout else "BROKEN", done.stderr[-300:]


def options_of(line: str) -> list[tuple[str, Any]]:
    """Return the kind and the click parameter of every option and argument of a command."""
    script, *command = line.split()
    with patch("sys.path", [str(SCRIPTS), *sys.path]):
        cli = runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="read")["cli"]
    found = dressed(cli)
    one = next(
        c.callback for c in cli.registered_commands if not command or c.callback.__name__ in command
    )
    hints = get_type_hints(one)
    params = (found.commands[command[0]] if command else found).params
    return [(_kind(hints[param.name]), param) for param in params if param.name in hints]


def _kind(hint: Any) -> str:
    """Return what values of this type are written as."""
    while get_args(hint):  # of X | None, of list[X]
        hint = get_args(hint)[0]
    kinds = {bool: "flag", int: "integer", float: "float", StrEnum: "choice", Path: "path"}
    return next((kind for one, kind in kinds.items() if issubclass(hint, one)), "text")


def wrong_values(kind: str, name: str) -> list[tuple[str, bool]]:
    """Return values of an option, and whether it may not take them."""
    if name in WRITTEN:
        return [("empty/x", True), *((value, False) for value in ("", "empty", "binary", "folder"))]
    below = ["-1"] if name in BELOW_ZERO else []
    wrong = [value for value in WRONG.get(kind, []) if value not in below]
    if name in AS_NUMBERS and kind == "text":
        wrong = NUMBERS
    if name in AS_FOLDERS and kind == "text":
        wrong = WRONG["path"]
    wrong = [*wrong, "1000000"] if name == "threads" else wrong
    if name == "config":  # an empty one changes nothing
        wrong = [value for value in wrong if value != "empty"]
    doubtful = [value for value in DOUBTFUL.get(kind, []) if value not in wrong]
    return [(value, True) for value in wrong] + [(value, False) for value in [*doubtful, *below]]


def with_value(words: list[str], param: Any, value: str) -> list[str]:
    """Return a command line in which a parameter has this value and no other."""
    if param.param_type_name == "argument":
        return [value, *words[1:]] if param.nargs == 1 else [*words, value]
    flag = max(param.opts, key=len)
    if flag in words:
        place = words.index(flag)
        words = words[:place] + words[place + 2 :]
    return [*words, flag, value]


def test_every_command_has_a_line() -> None:
    scripts = {path.stem for path in SCRIPTS.glob("*.py")} - NO_LINES
    assert scripts == {line.split()[0] for line in LINES}


@pytest.mark.parametrize("line", LINES)
def test_no_option_takes_what_is_wrong(line: str, places: dict[str, str]) -> None:
    words = shlex.split(LINES[line])
    words = ["/".join(places.get(p, p) for p in w.split("/")) for w in words]
    words = ["=".join(places.get(p, p) for p in w.split("=")) for w in words]
    outcome, said = call(line, words)
    assert line in NOT_HERE or outcome in ("done", "failed", "worked"), said
    found: list[str] = []
    for kind, param in options_of(line):
        for value, wrong in wrong_values(kind, param.name):
            given = (
                places.get(value, value)
                if "/" not in value
                else value.replace("empty", places["empty"])
            )
            shutil.rmtree(places["folder"])  # a command before may have written there
            Path(places["folder"]).mkdir()
            outcome, said = call(line, with_value(words, param, given))
            if outcome == "BROKEN" or (wrong and outcome != "refused"):
                found.append(f"--{param.name} {value!r}: {outcome} {said}")
    assert not found, "\n".join(found)


def settings_of(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Return the name and the default of every setting of a training run."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from settings_of(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def test_half_a_character_is_no_setting() -> None:
    with pytest.raises(UserError, match="no UTF-8"):
        load(TrainSettings, [], ["data.path=\udce9"])


def test_no_setting_takes_what_is_wrong() -> None:
    found: list[str] = []
    for name, default in settings_of(yaml.safe_load(to_yaml(TrainSettings()))):
        number = isinstance(default, int | float) and not isinstance(default, bool)
        never = [".nan", HUGE] if number else []
        for value in never or ["-1", "[1]"]:
            given = ["target=T", "output=O", "data.path=C", f"{name}={value}"]
            try:
                load(TrainSettings, [], given)
                outcome = "taken" if number and value in never else ""
            except UserError as error:
                outcome = "" if "\n" not in str(error) else "more than a line"
            except Exception as error:
                outcome = repr(error)[:200]
            found += [f"{name}={value!r}: {outcome}"] if outcome else []
    assert not found, "\n".join(found)

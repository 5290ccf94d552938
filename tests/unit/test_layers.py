"""The layers of the project, read from its imports: drafters <- inference <- training <- scripts.

Also: what each layer must not import, names of files that would hide other modules, and that no
method is named where the engine works for all of them.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ["drafters", "inference", "training", "scripts"]
OURS = {*LAYERS, "tests", "console"}
# Accelerators of training, trackers and command lines have no place in the library.
BANNED = {
    "drafters": {"argparse", "typer", "click", "accelerate", "wandb", "tensorboard", "peft"},
    "inference": {"argparse", "typer", "click", "accelerate", "wandb", "tensorboard", "peft"},
    "training": {"argparse", "click"},
}
# A target may come as an adapter of another one, in PEFT's own format.
READS_ADAPTERS = ("drafters/adapter.py", "peft")
# Method names that are also everyday words: only a string that is the whole name counts.
EVERYDAY = {"suffix", "lookahead", "hybrid", "draft_model", "standalone"}
# What transformers calls a kind of layer.
FOREIGN = {("drafters/selftest.py", "hybrid")}
# The baseline that every measurement compares with, and a value of many options.
BASELINE = "none"


def sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


@cache
def imports(file: Path) -> list[str]:
    found = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(file)}:{node.lineno}: relative import"
            assert node.module is not None
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def test_there_is_something_to_read() -> None:
    assert all(sources(layer) for layer in LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_down(layer: str) -> None:
    above = set(LAYERS[LAYERS.index(layer) + 1 :]) | {"tests"}
    if layer != "scripts":
        above.add("console")
    wrong = above | BANNED.get(layer, set())
    assert [
        f"{relative(file)} imports {name}"
        for file in sources(layer)
        for name in imports(file)
        if (top := name.split(".")[0]) in wrong and (relative(file), top) != READS_ADAPTERS
    ] == []


def test_no_file_hides_another_module() -> None:
    # `python training/train_x.py` puts the script's own folder first on sys.path.
    known = (set(providers()) - OURS) | sys.stdlib_module_names
    files = sources("training", "inference", "scripts")
    assert [relative(file) for file in files if file.stem in known] == []


@cache
def providers() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


@cache
def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    return {re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for line in lines}


def is_declared(module: str) -> bool:
    return not declared().isdisjoint(p.lower().replace("_", "-") for p in providers()[module])


def test_what_is_imported_is_declared() -> None:
    ours = OURS | sys.stdlib_module_names
    undeclared = [
        f"{relative(file)} imports {name}; declare it in pyproject.toml"
        for file in sources(*LAYERS)
        for name in imports(file)
        if (top := name.split(".")[0]) not in ours and not is_declared(top)
    ]
    assert undeclared == []


def methods() -> list[str]:
    files = (ROOT / "drafters" / "methods").glob("*.py")
    return sorted(f.stem for f in files if not f.stem.startswith("_") and f.stem != BASELINE)


def engine_files() -> list[Path]:
    outside = ("drafters/methods/", "drafters/formats/", "training/train_")
    files = sources("drafters", "inference", "training")
    return [file for file in files if not relative(file).startswith(outside)]


def docstrings(file: Path) -> set[int]:
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for node in nodes(file):
        if isinstance(node, holders) and ast.get_docstring(node, clean=False) is not None:
            found.add(id(node.body[0].value))
    return found


def words(file: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it is a string, for all identifiers and strings of code."""
    skip = docstrings(file)
    for node in nodes(file):
        if id(node) in skip:
            continue
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield line, node.value, True
        for field in ("id", "attr", "name", "arg", "module", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield line, value, False


@cache
def named(text: str, is_string: bool, names: tuple[str, ...]) -> list[str]:
    if is_string and text in names:
        return [text]
    parts = set(re.findall(r"[a-z]+|[A-Z][a-z]*|[A-Z]+|\d+", text.replace("_", " ")))
    letters = {part.lower() for part in parts}
    return [name for name in names if name in letters and name not in EVERYDAY]


def test_no_method_is_named_outside_its_file() -> None:
    names = tuple(methods())
    leaks = [
        f"{relative(file)}:{line}: {text!r} names {found}"
        for file in engine_files()
        for line, text, is_string in words(file)
        if (found := named(text, is_string, names)) and (relative(file), text) not in FOREIGN
    ]
    assert leaks == []


@pytest.mark.parametrize(
    ("text", "is_string", "found"),
    [
        ("eagle", True, ["eagle"]),
        ("EagleDrafter", False, ["eagle"]),
        ("load_eagle_head", False, ["eagle"]),
        ("the eagle has landed", True, ["eagle"]),
        ("beagle", False, []),
        ("suffix", False, []),
        ("suffix", True, ["suffix"]),
        ("a suffix", True, []),
    ],
)
def test_names_are_found(text: str, is_string: bool, found: list[str]) -> None:
    assert named(text, is_string, ("eagle", "suffix")) == found

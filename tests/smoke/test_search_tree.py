"""scripts/search_tree.py as a person calls it, on a tiny target with untrained heads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drafters.checkpoint import save_drafter
from drafters.registry import build_drafter
from drafters.target import Target
from inference import generate
from inference.spec import Spec
from tests.folders import save_tiny_target
from tests.scripts import Done, run_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    target = Target.load(save_tiny_target(place / "target", num_hidden_layers=1))
    heads = build_drafter("medusa", {"heads": 3}, target.shape)
    heads.init_from(target)  # type: ignore[union-attr]
    save_drafter(heads, place / "heads", target)  # type: ignore[arg-type]
    lines = [{"question_id": n, "category": "chat", "turns": ["Hi the land"]} for n in range(3)]
    (place / "set.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def options(place: Path, *more: str) -> list[str]:
    where = ["--target", place / "target", "--drafter", place / "heads", "--out", place / "t.json"]
    return [str(x) for x in [*where, "--prompts", place / "set.jsonl", "--nodes", "7", *more]]


def call(place: Path, *more: str) -> Done:
    return run_script("search_tree.py", *options(place, "--max-new-tokens", "12", *more))


def test_a_tree_is_searched_and_drafted_in(place: Path) -> None:
    done = call(place, "--limit", "2", "--ranks", "4")
    assert done.returncode == 0
    spec = done.stdout.strip().removeprefix("--drafter ")
    assert spec == f"{place / 'heads'}:growth=static,tree={place / 't.json'}"
    held = json.loads((place / "t.json").read_text())
    assert len(held["paths"]) == 7
    assert [len(row) for row in held["accuracies"]] == [4, 4, 4]
    assert held["seed"] == 0
    assert "torch" in held["versions"]
    assert "7 nodes, " in done.stderr
    assert f"expected tau {held['expected_tau']:.2f}" in done.stderr
    parsed, target = Spec.parse(spec), Target.load(place / "target")
    assert parsed.growth.nodes == 7
    outputs = [
        generate(target, one.load(target), [[5, 6, 7]], growth=one.growth, max_new_tokens=9)[0].ids
        for one in (parsed, Spec.parse("none"))
    ]
    assert outputs[0] == outputs[1]


def test_mistakes_are_one_line(place: Path) -> None:
    for more, told in (
        (("--nodes", "0"), "nodes is 0: give 1 or more"),
        (("--ranks", "0"), "ranks is 0: give 1 or more"),
        (("--drafter", "ngram"), "drafter ngram has no trained depths to judge"),
    ):
        done = call(place, *more)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert told in done.stderr


@pytest.mark.slow
def test_a_process_searches(place: Path) -> None:
    command = [sys.executable, "scripts/search_tree.py"]
    done = subprocess.run(
        [*command, *options(place, "--max-new-tokens", "8", "--temperature", "1")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--drafter ")

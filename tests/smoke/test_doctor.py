"""scripts/doctor.py as a person calls it, on a tiny target."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drafters.base import NeuralDrafter
from drafters.checkpoint import save_drafter
from drafters.registry import build_drafter
from drafters.target import Target
from inference.doctor import LINKS
from tests.folders import save_tiny_target
from tests.scripts import Done, run_script

ROOT = Path(__file__).parents[2]
QUICK = ("--limit", "3", "--max-new-tokens", "8")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def untrained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    decider = Target.load(target)
    drafter = build_drafter("medusa", {"draft_vocab_size": 0, "heads": 2}, decider.shape)
    assert isinstance(drafter, NeuralDrafter)
    drafter.init_from(decider)
    return save_drafter(drafter, tmp_path_factory.mktemp("drafters") / "untrained", decider)


def call(target: Path, drafter: object, *options: str) -> Done:
    where = ("--target", str(target), "--drafter", str(drafter))
    return run_script("doctor.py", *where, *QUICK, *options)


def test_a_healthy_chain_is_a_table_and_exit_code_0(target: Path) -> None:
    done = call(target, "ngram")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "healthy"
    for link in LINKS:
        assert link in done.stdout
    assert "3 greedy answers equal plain decoding's" in done.stdout


def test_a_broken_chain_is_named_with_its_fix_and_exit_code_1(
    target: Path, untrained: Path
) -> None:
    done = call(target, untrained)
    assert done.returncode == 1
    named, fix = done.stderr.splitlines()[-2:]
    assert named.startswith("broken: tensors: outputs.0.weight equals the target's own head")
    assert fix.startswith("fix: save the drafter's own head")
    assert "not reached" in done.stdout


def test_json_is_one_object(target: Path, untrained: Path) -> None:
    found = json.loads(call(target, untrained, "--json").stdout)
    assert (found["healthy"], found["broken"]) == (False, "tensors")
    assert "torch" in found["versions"]
    assert {one["link"] for one in found["links"]} == set(LINKS)
    assert set(found["links"][0]) == {"link", "status", "said", "fix", "figures"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--template-options", "{"), "is not JSON"),
        (("--template-options", "[1]"), "give a JSON object"),
        (("--prompts", "/nowhere.jsonl"), "/nowhere.jsonl cannot be read"),
        (("--max-new-tokens", "1"), "give 4 or more"),
        (("--limit", "0"), "give 1 or more"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    options: tuple[str, str], said: str, target: Path
) -> None:
    done = call(target, "ngram", *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert "did you mean ngram" in call(target, "ngrm").stderr
    assert "no such folder" in call(target, "runs/demo/nothing/best").stderr


@pytest.mark.slow
def test_a_process_ends_with_the_same_code(target: Path, untrained: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/doctor.py", "--target", target, "--drafter", untrained, *QUICK],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "broken: tensors" in done.stderr

"""scripts/plan.py as a person calls it; nothing of it runs a model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import run_script

ROOT = Path(__file__).parents[2]


def test_a_process_says_what_pays() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/plan.py", "speedup", "--alpha", "0.8", "--c", "0.05"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "best: gamma 8, 3.09 times plain decoding" in done.stdout
    assert "assumed: c = 0.05 of a plain round for every drafted depth, and 0 in all" in done.stdout


def test_a_best_chain_at_the_end_of_what_was_weighed_says_so() -> None:
    done = run_script("plan.py", "speedup", "--alpha", "0.4", "--overhead", "0.2", "--gamma", "4")
    assert "best: gamma 32 (the longest weighed), 1.39 times" in done.stdout
    assert "gamma 4: 1.65 tokens a round that costs 1.20 plain ones" in done.stdout
    assert "it pays from alpha .167 on" in done.stdout


def test_typed_numbers_as_json() -> None:
    options = ("--alpha", "0.6", "--c", "0.2", "--gamma", "8", "--flat", "64", "--json")
    done = run_script("plan.py", "speedup", *options)
    (found,) = json.loads(done.stdout)
    assert (found["best"]["gamma"], round(found["asked"]["speedup"], 2)) == (2, 0.95)
    assert found["stops_at_gamma"] == 8
    assert 1 < found["last_batch"] < 64
    assert any("up to 64 tokens in all rows" in line for line in found["assumed"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "error: give --alpha with --c or --overhead, or --benchmark, and not both"),
        (["--alpha", "2"], "error: alpha is 2.0: give a share from 0 to 1"),
        (["--alpha", ".5", "--gamma", "40"], "error: gamma is 40: acceptance is known for 1 to 32"),
        (["--benchmark", "nowhere"], "error: nowhere is no benchmark.json (nowhere cannot be read"),
        (["--benchmark", "nowhere", "--c", "1"], "error: --benchmark has costs: leave out --c"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], message: str) -> None:
    done = run_script("plan.py", "speedup", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)


def test_a_project_on_paper() -> None:
    options = ("--target", "qwen3-235b-a22b", "--method", "eagle3", "--tokens", "500M")
    where = ("--gpus", "8", "--gpu", "h100", "drafter.draft_vocab_size=32000")
    done = run_script("plan.py", "train", *options, *where, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)["plan"]
    assert found["target"]["parameters"] == 235_093_634_560
    assert round(found["disk"]["gb_a_million_tokens"], 1) == 32.8  # (3 + 1) x 4096 x 2 + 8 bytes
    assert not found["fits"]["with_target"]
    assert found["fits"]["without_target"]
    done = run_script("plan.py", "train", *options, *where)
    assert "in all, target whole on every device" in done.stdout
    assert "too much" in done.stdout
    assert "a copy of the target takes 8 of the 8 devices: 1 write answers" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "error: give --target, such as llama-3.1-8b, or --calibrate with a run's folder"),
        (["--target", "llama-3.1-8b", "--gpu", "abacus"], "error: gpu is 'abacus': give rtx4090"),
        (
            ["--target", "llama-3.1-8b", "--tokens", "many"],
            "error: tokens is 'many': give a number",
        ),
        (["--target", "llama-3.1-8b", "--method", "eagel"], "error: no drafter is called 'eagel'"),
        (
            ["--target", "llama-3.1-8b", "drafter.unrol=2"],
            "error: drafter eagle: unknown key 'unrol'",
        ),
        (["--calibrate", "nowhere"], "error: nowhere/settings.yaml"),
    ],
)
def test_a_mistake_in_a_project_is_one_line(options: list[str], message: str) -> None:
    done = run_script("plan.py", "train", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message), done.stderr

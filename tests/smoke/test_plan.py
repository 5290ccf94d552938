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
        (["--benchmark", "nowhere"], "error: nowhere cannot be read"),
        (["--benchmark", "nowhere", "--c", "1"], "error: --benchmark has costs: leave out --c"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], message: str) -> None:
    done = run_script("plan.py", "speedup", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)

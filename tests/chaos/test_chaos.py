"""A few cases of `make chaos`: every command is stopped twice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_stopped_commands_go_on_to_the_same_result() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--seed", "1", "--kills", "5", "--faults", "9"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "0 failed of 14"

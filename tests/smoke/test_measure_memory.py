"""scripts/measure_memory.py on a tiny target."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.folders import save_tiny_target
from tests.scripts import SCRIPTS, run_script

CONFIG = str(SCRIPTS.parent / "configs" / "smoke" / "eagle.yaml")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)


def test_a_table_of_lengths_and_steps(target: Path) -> None:
    options = ["eagle", "--config", CONFIG, f"target={target}", "--lengths", "32,64"]
    done = run_script("measure_memory.py", *options, "--vary", "drafter.unroll=1,3")
    assert done.returncode == 0, done.stderr
    assert "drafter.unroll" in done.stdout
    rows = [line.split("│")[1:4] for line in done.stdout.splitlines() if "MiB" in line]
    peaks = [[float(cell.split()[0]) for cell in row[1:]] for row in rows]
    assert peaks[0][0] < peaks[0][1] < peaks[1][1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--lengths", "8k"], "--lengths is '8k'"),
        (["--vary", "drafter.unroll"], "give KEY=VALUE"),
        (["--vary", "drafter.unrol=1"], "unrol"),
    ],
)
def test_bad_input_is_one_line(target: Path, more: list[str], said: str) -> None:
    done = run_script("measure_memory.py", "eagle", f"target={target}", *more)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_process_of_its_own(target: Path) -> None:
    command = [sys.executable, "scripts/measure_memory.py", "eagle", "--config", CONFIG]
    command += [f"target={target}", "--lengths", "32"]
    done = subprocess.run(
        command, cwd=SCRIPTS.parent, capture_output=True, text=True, check=True, timeout=300
    )
    assert "MiB" in done.stdout

"""scripts/export.py as a person calls it, on a tiny target."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drafters.checkpoint import load_drafter
from drafters.target import Target
from tests.folders import save_tiny_target
from tests.foreign import saved
from tests.scripts import run_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=2)


@pytest.fixture
def drafter(folder: Path, tmp_path: Path) -> Path:
    return saved(Target.load(folder), tmp_path / "drafter", "eagle", taps=[0, 1])


@pytest.mark.slow
def test_a_process_lists_the_formats() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/export.py", "--list"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "speculators   to, from    eagle" in done.stdout.splitlines()


def test_there_and_back(folder: Path, drafter: Path, tmp_path: Path) -> None:
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    done = run_script("export.py", str(drafter), "--to", "vllm", "--out", out)
    assert (done.returncode, done.stdout) == (0, f"{out}\n")
    target = ("--target", str(folder))
    done = run_script("export.py", out, "--from", "auto", *target, "--out", back)
    assert (done.returncode, done.stdout) == (0, f"{back}\n")
    load_drafter(back, Target.load(folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give either --to FORMAT or --from FORMAT"),
        (("--to", "vllm", "--from", "auto"), "give either --to FORMAT or --from FORMAT"),
        (("--from", "auto"), "a drafter is imported for a target: give --target too"),
        (("--to", "vlm"), "no format 'vlm' is written here (did you mean vllm?)"),
        (("--to", "safeai"), "taps = [0, 1]"),
        (("--to", "medusa"), "the format medusa holds no eagle drafters: give --to safeai, sglang"),
        (("--to", "speculators"), "give --target too"),
    ],
)
def test_a_mistake_is_one_line(
    options: tuple[str, ...], message: str, drafter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = run_script("export.py", str(drafter), *options, "--out", str(out))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not out.exists()


def test_a_loss_is_said(folder: Path, drafter: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    done = run_script("export.py", str(drafter), "--to", "safeai", "--allow-loss", "--out", out)
    assert done.returncode == 0
    assert "lost: taps = [0, 1]" in done.stderr

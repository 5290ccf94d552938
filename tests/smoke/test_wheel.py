"""The built wheel, installed apart, works from an empty folder: no checkout is in reach."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.folders import save_tiny_target

ROOT = Path(__file__).parents[2]
pytest.importorskip("hatchling", reason="the extra dev brings it")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--wheel-dir", folder, ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [made] = folder.glob("specdrafters-*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", folder, wheel], check=True)
    return folder


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def call(installed: Path, empty: Path, *arguments: str | Path) -> str:
    """Run the console command with nothing but the installed wheel on the path."""
    done = subprocess.run(
        [sys.executable, installed / "bin" / "drafters", *arguments],
        cwd=empty,
        env=os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_it_holds(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {name.split("/")[0] for name in names}
    version = wheel.name.split("-")[1]
    assert ours == {"drafters", "inference", "training", f"specdrafters-{version}.dist-info"}
    assert {f"{name}/py.typed" for name in ("drafters", "inference", "training")} <= names
    for folder, place in (("configs", "_configs"), ("scripts", "_scripts")):
        listed = subprocess.run(
            ["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        assert listed
        inside = {f"drafters/{place}/{name.removeprefix(folder + '/')}" for name in listed}
        assert inside <= names
    assert "drafters/native.c" in names
    assert "drafters/card.md.jinja" in names


def test_a_wheel_trains_and_measures(installed: Path, empty: Path, tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "target", num_hidden_layers=8)
    told = call(installed, empty, "--help")
    assert "Usage: drafters [OPTIONS]" in told
    assert "drafters benchmark --help" in told
    assert " demo " not in told  # its steps lie in a checkout
    chat = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "and then " * 6}]
    lines = [json.dumps({"id": f"chat-{number}", "messages": chat}) for number in range(40)]
    (empty / "chats.jsonl").write_text("\n".join(lines))
    where = [f"target={target}", "data.path=chats.jsonl", "output=run", "schedule.steps=2"]
    config = ["--config", "configs/smoke/medusa.yaml"]
    launched = ["train", "--config_file", "configs/accelerate/cpu.yaml", "medusa"]
    best = call(installed, empty, *launched, *config, *where).split()[-1]
    told = call(
        installed, empty, "benchmark", "--target", target, "--drafter", f"{best}:gamma=2",
        "--prompts", "configs/prompts/demo.jsonl", "--limit", "1", "--max-new-tokens", "4",
        "--repeats", "1", "--warmup", "0", "--json",
    )  # fmt: skip
    assert '"identical": 1' in told


def test_what_ships_is_found(installed: Path, empty: Path) -> None:
    """Chats and prompts of configs/, without a checkout."""
    code = (
        "from pathlib import Path;"
        "from training.records import read_records, template_options_of, writer_of;"
        "from inference.prompts import read_prompts;"
        "from training.sources import self_chat;"
        "self_chat(Path('configs/openings/general.txt'), 0);"
        "print(len(read_records('configs/chats')) > 100, writer_of('configs/chats') is not None,"
        "len(read_prompts('configs/prompts/demo.jsonl')))"
    )
    env = os.environ | {"PYTHONPATH": str(installed)}
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=empty, env=env, capture_output=True, text=True, check=True
    ).stdout
    assert told == "True True 40\n"

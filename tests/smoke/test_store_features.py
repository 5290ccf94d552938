"""scripts/store_features.py, and a training run that reads what it stored."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drafters.target import Target
from inference.served import Engine
from tests.folders import save_tiny_target
from tests.scripts import SCRIPTS, Done, run_script
from tests.smoke.test_training import WORDS
from tests.unit.test_served_states import Stand
from training.run import main

CONFIG = str(SCRIPTS.parent / "configs" / "smoke" / "eagle.yaml")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    save_tiny_target(folder / "target", num_hidden_layers=8)
    source = random.Random(0)
    lines = []
    for number in range(24):
        said = (" ".join(source.choices(WORDS, k=k)) for k in (4, 9))
        chat = [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), said, strict=True)
        ]
        lines.append(json.dumps({"id": f"chat-{number}", "messages": chat}))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def given(place: Path, *more: str) -> list[str]:
    return [f"target={place / 'target'}", f"data.path={place / 'chats.jsonl'}", *more]


def store(*options: str) -> Done:
    return run_script("store_features.py", "eagle", "--config", CONFIG, *options)


def test_training_reads_what_was_stored(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "features"
    options = given(place, f"features.store={folder}")
    done = store(*options)
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    assert "0 of them in" in done.stderr
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == 2  # to learn from, and held out

    def never(*_: object) -> None:
        raise AssertionError("the target ran over a batch")

    monkeypatch.setattr(Target, "forward_batch", never)
    assert store(*options).returncode == 0
    assert sorted(folder.glob("*.safetensors")) == shards
    arguments = ["--config", CONFIG, *options, f"output={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", ["train_eagle.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        main("eagle", "smoke/eagle.yaml", "Train.")
    assert ended.value.code == 0
    (counts,) = re.findall(r"(\d+) batches; (\d+) of them in", capsys.readouterr().err)
    assert counts[0] == counts[1]


def test_an_engine_holds_the_target(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its states are stored, and training on them starts no engine."""
    options = given(place, f"features.store={tmp_path / 'features'}", "features.engine=vllm")
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path / "cache"))
    done = store(*options)
    assert (done.returncode, "make engines" in done.stderr.splitlines()[-1]) == (2, True)
    started: list[tuple[Path, dict[str, int]]] = []

    def start(_: Path, folder: Path, dtype: str, **sizes: int) -> Stand:
        started.append((folder, sizes))
        return Stand(Target.load(folder, dtype=dtype))

    monkeypatch.setattr("training.served_target.StateServer", start)
    monkeypatch.setattr(Engine, "__post_init__", lambda _: None)
    done = store(*options, "features.engine_options={tensor_parallel_size: 2}")
    assert done.returncode == 0, done.stderr
    ((folder, sizes),) = started
    assert folder == place / "target"
    assert sizes["options"] == {"tensor_parallel_size": 2}
    arguments = ["--config", CONFIG, *options, f"output={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", ["train_eagle.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        main("eagle", "smoke/eagle.yaml", "Train.")
    assert (ended.value.code, len(started)) == (0, 1)
    assert "tau is not measured" in capsys.readouterr().err
    metrics = (tmp_path / "out" / "metrics.jsonl").read_text()
    assert "agreement/1" in metrics
    assert "tau" not in metrics


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "features.store is empty"),
        (("features.store=/dev/null/x",), "/dev/null is no folder to write in"),
        (("features.dtype=int8", "features.store=x"), "features.dtype is 'int8'"),
        (("features.engine=sglang", "features.store=x"), "features.engine is 'sglang'"),
        (
            ("features.engine_options={a: 1}", "features.store=x"),
            "features.engine_options belongs to features.engine",
        ),
        (
            ("features.engine=vllm", "features.store=x", "adapter.rank=4"),
            "adapter.rank is 4, which runs the target's layers in this process",
        ),
    ],
)
def test_bad_input_is_one_line(place: Path, more: tuple[str, ...], said: str) -> None:
    done = store(*given(place, *more))
    assert done.returncode == 2, done.stderr
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_process_of_its_own(place: Path, tmp_path: Path) -> None:
    command = [sys.executable, "scripts/store_features.py", "eagle", "--config", CONFIG]
    command += given(place, f"features.store={tmp_path / 'features'}", "threads=1")
    done = subprocess.run(
        command, cwd=SCRIPTS.parent, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == f"{tmp_path / 'features'}\n"
    assert "shards" in done.stderr

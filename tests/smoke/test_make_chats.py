"""scripts/make_chats.py as a person calls it, on a tiny target."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from drafters.settings import load
from drafters.target import Target
from tests.folders import save_tiny_target
from tests.scripts import SCRIPTS, Done, run_script
from training.batches import documents
from training.examples import Example
from training.feature_store import FeatureStore, Kind
from training.options import TrainSettings
from training.parts import prepare

QUICK = ("--max-new-tokens", "8", "--user-tokens", "8", "--rows", "8", "--max-looped", "1")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # half of all bytes end a message, so that a random model comes to an end
    folder = tmp_path_factory.mktemp("target")
    return save_tiny_target(folder, initializer_range=0.02, eos_token_id=list(range(2, 130)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("base"), template=False)


def make(target: Path, out: Path, *options: str) -> Done:
    return run_script("make_chats.py", "--target", str(target), "--out", str(out), *options)


def test_a_self_chat_with_openings(target: Path, tmp_path: Path) -> None:
    openings = tmp_path / "openings.txt"
    openings.write_text("code\tWrite a\n\n")
    out = tmp_path / "chats"
    options = ("--chats", "6", "--openings", str(openings), "--temperatures", "1,0.9", *QUICK)
    done = make(target, out, *options)
    assert (done.returncode, done.stdout) == (0, f"{out / 'chats.parquet'}\n"), done.stderr
    assert "6 chats" in done.stderr
    table = pq.read_table(out / "chats.parquet")
    assert table.num_rows == 6
    assert set(table["category"].to_pylist()) <= {"code", ""}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["chats"] == 6
    assert manifest["supervised_tokens"] == sum(map(sum, table["label_mask"].to_pylist()))
    assert "--chats 6" in manifest["command"]
    assert manifest["settings"]["target"]["vocab_size"] == 265
    assert {"tokens_per_second", "dropped", "rules", "versions", "schema"} <= set(manifest)
    again = make(target, out, *options)
    assert again.returncode == 0
    assert "there already" in again.stderr
    other = make(target, out, *options, "--seed", "1")
    assert other.returncode == 2
    assert "give another --out" in other.stderr


def test_given_prompts_and_texts(target: Path, base: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"question_id": f"q{i}", "category": "c", "turns": [f"{i}?", "Why?"]} for i in "ab"]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = make(target, tmp_path / "a", "--prompts", str(prompts), *QUICK, "--temperatures", "1")
    assert done.returncode == 0, done.stderr
    ids = pq.read_table(tmp_path / "a" / "chats.parquet")["id"].to_pylist()
    assert {name.split(".")[0] for name in ids} <= {"qa", "qb"}
    texts = tmp_path / "texts.txt"
    texts.write_text("the inn\nand then\n")
    done = make(base, tmp_path / "t", "--texts", str(texts), *QUICK)
    assert done.returncode == 0, done.stderr
    assert pq.read_table(tmp_path / "t" / "chats.parquet").num_rows == 2


def test_states_are_kept_for_training(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "chats"
    options = ("--chats", "12", "--temperatures", "1,0.9", *QUICK)
    done = make(target, out, *options, "--features", "0,2")
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "manifest.json").read_text())["chats"] == 12

    def never(*_: object) -> None:
        raise AssertionError("the target ran over a batch")

    monkeypatch.setattr(Target, "forward_batch", never)
    given = [f"target={target}", f"data.path={out}", f"features.store={out / 'features'}"]
    given += ["output=unused", "threads=1", "drafter={taps: [0, 2], draft_vocab_size: 0}"]
    parts = prepare("eagle", load(TrainSettings, [], given))
    for lessons in (parts.lessons, parts.held_out):
        for index in range(len(lessons)):
            assert torch.isfinite(parts.objective(lessons[index]).loss).all()
    again = make(target, out, *options)
    assert again.returncode == 2
    assert "features" in again.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --tokens N or --chats N"),
        (["--chats", "0"], "--chats is 0"),
        (["--chats", "2", "--temperatures", "hot"], "--temperatures is 'hot'"),
        (["--chats", "2", "--temperatures", "0,-1"], "temperature is -1.0"),
        (["--chats", "2", "--openings", "none.txt"], "openings none.txt cannot be read"),
        (["--prompts", "none.jsonl"], "none.jsonl cannot be read"),
        (["--prompts", "a", "--texts", "b"], "exclude each other"),
        (["--chats", "2", "--template-option", "x"], "give KEY=VALUE"),
        (["--chats", "2", "--rows", "0"], "--rows is 0"),
        (["--chats", "2", "--features", "1,4"], "give layers from 0 to 3"),
        (["--chats", "2", "--features", "all"], "--features is 'all'"),
        (["--chats", "2"], "has no chat template"),
    ],
)
def test_bad_input_is_one_line(
    base: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    done = make(base, tmp_path / "out", *options)
    assert done.returncode == 2
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_process_of_its_own_says_one_line(base: Path, tmp_path: Path) -> None:
    options = ["--target", base, "--out", tmp_path / "out", "--chats", "2"]
    done = subprocess.run(
        [sys.executable, "scripts/make_chats.py", *options],
        cwd=SCRIPTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "no chat template" in done.stderr


def test_a_malformed_prompt_is_named_by_its_line(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question_id": 1, "category": "c", "turns": ["a"]}\n{"turns": []}\n')
    done = make(target, tmp_path / "out", "--prompts", str(prompts))
    assert done.returncode == 2
    assert f"{prompts}, line 2" in done.stderr


@pytest.mark.slow
def test_killed_and_called_again(target: Path, tmp_path: Path) -> None:
    options = [*QUICK, "--chats", "60", "--shard", "10", "--temperatures", "1,0.9"]
    options += ["--features", "0,2"]
    command = [sys.executable, SCRIPTS / "make_chats.py", "--target", target, *options, "--out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*command, whole], env=environment, check=True, capture_output=True)
    running = subprocess.Popen(
        [*command, killed], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not (killed / "shards" / "00001.parquet").exists():
        assert running.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not (killed / "manifest.json").exists()
    again = subprocess.run(
        [*command, killed], env=environment, check=True, capture_output=True, text=True
    )
    assert "going on after" in again.stderr
    tables = [pq.read_table(folder / "chats.parquet") for folder in (whole, killed)]
    assert tables[0].equals(tables[1])
    rows = tables[1].select(["ids", "label_mask"]).to_pylist()
    chats = [Example("", *(torch.tensor(value) for value in row.values())) for row in rows]
    kind = Kind.of(Target.load(target), (0, 2), "bfloat16")
    store = FeatureStore(killed / "features", kind)
    assert all(chat in store for chat in documents(chats))

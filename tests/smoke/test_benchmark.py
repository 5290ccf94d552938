"""scripts/benchmark.py as a person calls it, on a tiny target."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drafters.registry import methods
from tests.folders import save_tiny_target
from tests.scripts import Done, run_script

ROOT = Path(__file__).parents[2]
LINES = [
    {"question_id": 1, "category": "chat", "turns": ["Hi the land"]},
    {"question_id": 2, "category": "code", "turns": ["x = 1", "y = 2"]},
    {"question_id": 3, "category": "chat", "turns": ["and in the end"]},
]
QUICK = ("--max-new-tokens", "6", "--repeats", "1", "--warmup", "1", "--no-report")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=2)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


@pytest.fixture(autouse=True)
def _few_cost_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.bench._COST_SAMPLES", 1)


def call(folder: Path, prompts: Path, *options: str) -> Done:
    where = ("--target", str(folder), "--prompts", str(prompts))
    return run_script("benchmark.py", *where, "--out", str(prompts.parent / "out"), *options)


@pytest.mark.slow
def test_a_process_measures_and_writes(folder: Path, prompts: Path) -> None:
    out = prompts.parent / "out"
    options = ["--target", str(folder), "--prompts", str(prompts), "--out", str(out), *QUICK]
    done = subprocess.run(
        [sys.executable, "scripts/benchmark.py", *options, "--drafter", "ngram:gamma=2"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, f"wrote {out}/benchmark.json\n")
    assert "chain 2" in done.stdout
    result = json.loads((out / "benchmark.json").read_text())
    assert result["settings"]["prompts"] == 3
    assert result["settings"]["dtype"] == result["target"]["dtype"] == "float32"
    assert result["drafters"][0]["identical"] == 3


def test_shapes_rows_and_json(folder: Path, prompts: Path) -> None:
    shapes = ["chain,gamma=2", "static,branching=2.1", "dynamic,nodes=3,width=2,depth=2"]
    drafters = [f"--drafter={folder}:growth={shape}" for shape in shapes]
    done = call(folder, prompts, *QUICK, *drafters, "--rows", "2", "--limit", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((prompts.parent / "out" / "benchmark.json").read_text())
    found = result["drafters"]
    assert [one["growth"] for one in found] == ["chain", "static", "dynamic"]
    assert [one["nodes"] for one in found] == [2, 4, 3]
    assert [one["shape"] for one in found][1] == {"branching": [2, 1]}
    # the target drafts for itself: every depth is accepted, up to the limit of 6 tokens
    assert [one["alpha"] for one in found] == [1.0] * 3
    assert [one["identical"] for one in found] == [2] * 3
    assert {one["method"] for one in found} == {"draft_model"}
    assert all(one["parameters"] == result["target"]["parameters"] for one in found)
    assert [one["checkpoint"] for one in found] == [str(folder)] * 3
    assert list(found[0]["by_category"]) == ["chat", "code"]


def test_sampling(folder: Path, prompts: Path) -> None:
    sampled = f"--drafter={folder}:growth=chain,gamma=3,draft=sampled"
    done = call(folder, prompts, *QUICK, sampled, "--temperature", "0.8", "--json")
    assert done.returncode == 0, done.stderr
    one = json.loads(done.stdout)["drafters"][0]
    # p = q up to rounding: all but everything is accepted
    assert (one["draft_mode"], one["identical"]) == ("sampled", None)
    assert one["alpha"] > 0.9


def test_the_registered_methods_are_listed(folder: Path) -> None:
    done = run_script("benchmark.py", "--list")
    assert (done.returncode, done.stdout.splitlines()) == (0, sorted(methods()))
    assert "none" in done.stdout.splitlines()


def test_a_failed_check_is_exit_code_1(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.summary.JUDGED_PARAMETERS", 0)
    monkeypatch.setattr("inference.summary.JUDGED_ROUNDS", 1)
    monkeypatch.setattr("inference.summary.PLAIN_SHARE", 1e9)
    done = call(folder, prompts, *QUICK)
    assert done.returncode == 1
    assert "failed: plain decoding ran at" in done.stderr
    assert json.loads((prompts.parent / "out" / "benchmark.json").read_text())["failures"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafter", "ngrm"], "error: no drafter is called 'ngrm' (did you mean ngram?)"),
        (["--drafter", "ngram:growth=x"], "error: growth is 'x': give chain, static, dynamic"),
        (["--drafter", "ngram", "--drafter", "ngram"], "error: drafter 'ngram' is given twice"),
        (["--limit", "0"], "error: limit is 0: give 1 or more"),
        (["--repeats", "0"], "error: repeats is 0: give 1 or more"),
        (["--prompts", "none.jsonl"], "error: none.jsonl cannot be read (No such file"),
        (["--out", "/proc/x"], "error: /proc/x/benchmark.json cannot be written"),
        (["--target", "nowhere"], "error: target nowhere: "),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    folder: Path, prompts: Path, options: list[str], message: str
) -> None:
    done = call(folder, prompts, *QUICK, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(message)

"""scripts/tune.py as a person calls it, on a tiny target."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.folders import save_tiny_target
from tests.scripts import Done, run_script

ROOT = Path(__file__).parents[2]
LINES = [
    {"question_id": 1, "category": "chat", "turns": ["Hi the land"]},
    {"question_id": 2, "category": "code", "turns": ["x = 1"]},
]
QUICK = ("--max-new-tokens", "8", "--samples", "1", "--depth", "2", "--widths", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=1)


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def call(folder: Path, prompts: Path, *options: str) -> Done:
    where = ("--target", str(folder), "--prompts", str(prompts), "--drafter", str(folder))
    return run_script("tune.py", *where, "--out", str(prompts.parent / "out"), *QUICK, *options)


@pytest.mark.slow
def test_a_process_tunes_and_tries(folder: Path, prompts: Path) -> None:
    out = prompts.parent / "out"
    where = ["--target", str(folder), "--prompts", str(prompts), "--drafter", str(folder)]
    tries = ["--try", "1", "--repeats", "1", "--rows", "1,3", "--contexts", "100"]
    done = subprocess.run(
        [sys.executable, "scripts/tune.py", *where, "--out", str(out), *QUICK, *tries],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, f"wrote {out}/tune.json\n")
    assert "cost_aware 8/2/2" in done.stdout
    assert "\n1 row, context 100, T=0: " in done.stdout
    assert "\n3 rows, context 100, T=0: " in done.stdout
    loads = json.loads((out / "tune.json").read_text())["loads"]
    assert [load["rows"] for load in loads] == [1, 3]
    for load in loads:
        best, aware = load["tried"]
        assert best["spec"] == load["shapes"][0]["spec"]
        assert "cost_aware" in aware["spec"]
        assert all(one["measured"] > 0 for one in load["tried"])


def test_loads_shapes_and_json(folder: Path, prompts: Path) -> None:
    options = ("--rows", "1,2", "--contexts", "20,40", "--temperatures", "0,1", "--json")
    done = call(folder, prompts, *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((prompts.parent / "out" / "tune.json").read_text())
    loads = result["loads"]
    assert [(x["temperature"], x["rows"], x["context"]) for x in loads] == [
        (t, r, c) for t in (0, 1) for r in (1, 2) for c in (20, 40)
    ]
    for load in loads:
        values = [one["predicted"] for one in load["shapes"]]
        assert values == sorted(values, reverse=True)
        chains = {o["spec"]: o["tau"] for o in load["shapes"] if o["shape"]["width"] == 1}
        # the target drafts for itself: all is accepted
        drawn = ",draft=sampled" * (load["temperature"] > 0)
        names = [f"{folder}:growth=chain,gamma={gamma}{drawn}" for gamma in (1, 2)]
        assert [chains[name] for name in names] == pytest.approx([2, 3], abs=0.01)
        assert load["verify_seconds"]["1"] <= load["plain_seconds"]
    files = list((prompts.parent / "cache" / "costs").iterdir())
    assert len(files) == 2  # one a warp


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "1,x"], "error: rows is '1,x': give numbers with commas between"),
        (["--rows", "0"], "error: rows is 0: give whole numbers of 1 or more"),
        (["--rows", "2,2"], "error: rows is 2,2: a number is given twice"),
        (["--temperatures", "-1"], "error: temperature is -1.0: give 0 (greedy), or 1e-30 or more"),
        (["--overlap", "--try", "1"], "error: --overlap predicts and --try measures on this"),
        (["--engine", "fsat"], "error: Invalid value for '--engine'"),
        (["--depth", "0"], "error: depth is 0: give 1 or more"),
        (["--contexts", "9000"], "error: contexts go up to 9000: this target has room for"),
        (["--depth", "7"], "error: max_new_tokens is 8 and depth 7: give 9 tokens or more"),
        (["--drafter", "ngrm"], "error: no drafter is called 'ngrm' (did you mean ngram?)"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    folder: Path, prompts: Path, options: list[str], message: str
) -> None:
    done = call(folder, prompts, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(message)

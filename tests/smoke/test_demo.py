"""scripts/demo.py on tiny targets: the whole path, what is done once, and how it stops."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from drafters.settings import configs_dir
from inference.spec import Spec
from tests.folders import save_tiny_target
from tests.scripts import Done, run_script

ROOT = Path(__file__).parents[2]
WORDS = ["the land", "in the end", "and then", "a hand", "the sand", "rain in the hills"]


def save_plan(path: Path, **values: object) -> Path:
    plan = {"out": "runs/never", "fresh": "-c pass", "train": {}, "benchmark": []} | values
    path.write_text(yaml.safe_dump(plan))
    return path


def chats(folder: Path) -> Path:
    folder.mkdir()
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{number} {WORDS[number % 6]}"},
                {"role": "assistant", "content": f"{WORDS[number % 5]} {WORDS[number % 4]}"},
            ]
        }
        for number in range(40)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def call(plan: Path, out: Path, *options: str) -> Done:
    return run_script("demo.py", "--plan", str(plan), "--out", str(out), *options)


@pytest.mark.slow
def test_two_trainings_and_a_table_then_nothing_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = save_tiny_target(tmp_path / "target", num_hidden_layers=7)
    made = chats(tmp_path / "made")
    plan = save_plan(
        tmp_path / "plan.yaml",
        target=str(target),
        # chats made afresh: here a copy of what lies there
        fresh=f'-c \'import shutil; shutil.copytree("{made}", "{{chats}}")\'',
        train={
            "eagle": "training/train_eagle.py --config configs/smoke/eagle.yaml",
            "medusa": "training/train_medusa.py --config configs/smoke/medusa.yaml",
        },
        benchmark=[
            "--prompts configs/prompts/demo.jsonl --limit 2 --max-new-tokens 5 --repeats 1",
            "--warmup 0 --drafter ngram:gamma=2",
            "--drafter {out}/eagle/best:growth=chain,gamma=2",
            "--drafter {out}/medusa/best:growth=dynamic,nodes=3,width=2,depth=2",
        ],
    )
    out = tmp_path / "out"
    done = call(plan, out, "--fresh")
    assert done.returncode == 0, done.stderr + capfd.readouterr().err
    for expected in ("ngram", "eagle", "medusa", "dynamic 3/2/2"):
        assert expected in done.stdout
    result = json.loads((out / "benchmark.json").read_text())
    assert [one["identical"] for one in result["drafters"]] == [2, 2, 2]
    start = time.monotonic()
    again = call(plan, out, "--fresh")
    assert time.monotonic() - start < 5
    assert again.stdout == done.stdout
    assert again.stderr.count("done before") == 4


@pytest.mark.slow
def test_a_step_runs_again_only_if_its_command_changed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    log = tmp_path / "log"
    write = f'-c \'open("{log}", "a").write("x"); import os; os.makedirs("{{chats}}")\''
    fail = ["--prompts nowhere.jsonl"]
    plan = save_plan(tmp_path / "plan.yaml", target="nowhere", fresh=write, benchmark=fail)
    for _ in range(2):
        # the benchmark's mistake is its own; the step before it stays done
        assert call(plan, out, "--fresh").returncode == 2
    assert log.read_text() == "x"
    changed = save_plan(tmp_path / "plan.yaml", target="nowhere", fresh=write + " more")
    done = call(changed, out, "--fresh")
    assert "benchmark out ended with exit code 2" in done.stderr
    assert log.read_text() == "xx"


@pytest.mark.slow
def test_a_signal_reaches_what_is_running_and_its_end_is_awaited(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = tmp_path / "save.py"
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "def stop(number, frame):\n"
        "    time.sleep(0.5)\n"
        f"    pathlib.Path({str(tmp_path / 'saved')!r}).write_text('all')\n"
        "    sys.exit(130)\n"
        "signal.signal(signal.SIGINT, stop)\n"
        f"pathlib.Path({str(tmp_path / 'started')!r}).touch()\n"
        "time.sleep(60)\n"
    )
    plan = save_plan(tmp_path / "plan.yaml", target="nowhere", fresh=str(script))
    options = ["--plan", str(plan), "--out", str(out), "--fresh"]
    process = subprocess.Popen(
        [sys.executable, "scripts/demo.py", *options],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "started").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (tmp_path / "saved").read_text() == "all"
    assert "interrupted; what was saved stays" in err
    assert json.loads((out / "steps" / "chats.json").read_text())["done"] is False


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"benchmark": ["--drafter {where}/x"]}, "give {target}, {out}, {chats}"),
        ({"benchmark": ["--drafter 'x"]}, "cannot be read (No closing quotation)"),
        ({"trains": {}}, "trains"),
    ],
)
def test_a_wrong_plan_is_one_line(tmp_path: Path, values: dict[str, object], message: str) -> None:
    plan = save_plan(tmp_path / "plan.yaml", target="nowhere", **values)
    done = call(plan, tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize("name", ["full", "bench", "quick"])
def test_the_shapes_of_every_plan_can_be_read(name: str) -> None:
    plan = yaml.safe_load((configs_dir() / "demo" / f"{name}.yaml").read_text())
    specs = [line.split()[1] for line in plan["benchmark"] if line.startswith("--drafter")]
    assert len({Spec.parse(spec).text for spec in specs}) == len(specs) >= 3


@pytest.mark.slow
@pytest.mark.net
def test_quick_demo(tmp_path: Path) -> None:
    options = ["--quick", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "scripts/demo.py", *options],
        cwd=ROOT,
        env=os.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "benchmark.json").read_text())["drafters"]) == 3

"""The training commands: their mistakes in one line, and whole runs as subprocesses."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafters import Target, load_drafter
from drafters.base import NeuralDrafter
from drafters.checkpoint import save_drafter
from drafters.errors import UserError
from drafters.settings import load
from inference import generate
from tests.folders import save_tiny_target
from tests.tiny import prompts_of
from training.options import TrainSettings
from training.parts import prepare
from training.run import main
from training.state import STATE

ROOT = Path(__file__).parents[2]
COMMANDS = sorted((ROOT / "training").glob("train_*.py"))
FAMILIES = [command.stem.removeprefix("train_") for command in COMMANDS]
CONFIGS = sorted(path.stem for path in (ROOT / "configs" / "drafters").glob("*.yaml"))
SCRIPT_OF = {"eagle3": "eagle", "fastmtp": "mtp"}  # where a config's name is not its script's
WORDS = ["the", "and", "in", "an", "then", "thin", "anthem", "band", "hand", "sand"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a tiny target of 8 layers and 60 chats."""
    folder = tmp_path_factory.mktemp("training")
    save_tiny_target(folder / "target", num_hidden_layers=8)
    source = random.Random(0)
    with (folder / "chats.jsonl").open("w") as stream:
        for number in range(60):
            asked, answered = (" ".join(source.choices(WORDS, k=k)) for k in (4, 9))
            chat = [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answered},
            ]
            stream.write(json.dumps({"id": f"chat-{number}", "messages": chat}) + "\n")
    return folder


def settings(place: Path, output: Path, *more: str) -> list[str]:
    given = [f"target={place / 'target'}", f"data.path={place / 'chats.jsonl'}"]
    return [*given, f"output={output}", *more]


def run(*command: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == code, done.stderr
    return done


def train(family: str, place: Path, output: Path, *more: str, code: int = 0) -> str:
    script = ROOT / "training" / f"train_{family}.py"
    config = ("--config", ROOT / "configs" / "smoke" / f"{family}.yaml")
    return run(
        sys.executable, script, *config, *settings(place, output, *more), code=code
    ).stdout.strip()


def refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> str:
    """Run the command in this process; return its one line."""
    monkeypatch.setattr(sys, "argv", ["train_eagle.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        main("eagle", "smoke/eagle.yaml", "Train.")
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ")
    return lines[-1]


def test_an_output_that_is_a_file_is_refused_before_the_target_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (output := tmp_path / "out").touch()
    line = refused(capsys, monkeypatch, *settings(tmp_path / "nothing", output))
    assert line == f"error: {output} is a file: give another place"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["optim.lrr=1"], "unknown key 'optim.lrr'; the nearest known key is 'optim.lr'"),
        (["optim.lr=fast"], "optim.lr = 'fast' is not allowed; give a number"),
        (["optim.lr"], "'optim.lr' is not a setting"),
        (["--config", "configs/drafters/no.yaml"], "no config file"),
        (["--colour"], "No such option: --colour"),
        (["schedule.time_budget=12"], "give a duration such as 90s, 12m or 2h"),
        (["data.path=/nowhere/chats.jsonl"], "no such file or folder"),
        (["target=/nowhere/target"], "target '/nowhere/target':"),
        (["evaluate.shape=growth=bush"], "growth is 'bush'"),
        (["drafter.unrol=3"], "unrol"),
        (["drafter.taps=[1,9]"], "from 0 to 7"),
        (["drafter.draft_vocab_size=-1"], "draft_vocab_size is -1"),
        (["data.max_length=3"], "nothing to learn from"),
        (["optim.lr_scale={norm: 0, head: 0, fusion: 0, layers: 0}"], "freezes all parameters"),
        (["optim.lr_scale={tail: 1.0}"], "no parameter's name starts so"),
        (["schema_version=2"], "schema_version is 2, this code reads 1"),
        (["warm_start=/nowhere"], "warm_start /nowhere: not a folder that training wrote"),
        (["loss.mix={mse: 1}"], "loss.mix is 'mse'"),
        (["tracking.trackers=[paper]"], "tracking.trackers is 'paper'"),
    ],
)
def test_a_mistake_is_one_line(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: list[str],
    said: str,
) -> None:
    line = refused(capsys, monkeypatch, *settings(place, tmp_path / "out"), *changes)
    assert said in line


def test_a_shallow_target_needs_taps(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_tiny_target(tmp_path / "shallow", num_hidden_layers=4)
    given = settings(place, tmp_path / "out", f"target={tmp_path / 'shallow'}")
    assert "need a target of 7 layers or more" in refused(capsys, monkeypatch, *given)


@pytest.mark.parametrize("tied", [False, True])
def test_a39_a_run_in_this_process(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tied: bool,
) -> None:
    """Whole run in one process: train, publish, load, decode; and what a second call says.

    With tied embeddings (case A39) the drafter's small head is its own all the same.
    """
    model = place / "target"
    if tied:
        model = save_tiny_target(tmp_path / "tied", num_hidden_layers=8, tie_word_embeddings=True)
    given = settings(place, tmp_path / "out", f"target={model}")
    monkeypatch.setattr(sys, "argv", ["train_eagle.py", *given])
    with pytest.raises(SystemExit) as ended:
        main("eagle", "smoke/eagle.yaml", "Train.")
    assert ended.value.code == 0
    told = capsys.readouterr()
    assert told.out.strip() == str(tmp_path / "out" / "best")
    assert "a ceiling on alpha" in told.err
    assert "holds a run already" in refused(capsys, monkeypatch, *given)
    resolved = load(TrainSettings, [tmp_path / "out" / "settings.yaml"])
    assert resolved.drafter["taps"] == [1, 3, 4]
    target = Target.load(model)
    drafter = load_drafter(tmp_path / "out" / "best", target)
    assert isinstance(drafter, NeuralDrafter)
    assert drafter.ids is not None
    assert len(drafter.ids) == 128
    assert 2 in drafter.ids  # the ending token
    outputs = generate(target, drafter, prompts_of(5, 9), max_new_tokens=8)
    assert [len(output.ids) for output in outputs] == [8, 8]
    metrics = [json.loads(x) for x in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in metrics if "tau" in x] == [4, 8]


def test_a_warm_start_is_not_a_resume(place: Path, tmp_path: Path) -> None:
    """Weights and vocabulary are taken over where they fit; the rest starts afresh and is named."""
    config = ROOT / "configs" / "smoke" / "eagle.yaml"
    given = settings(place, tmp_path / "out")
    first = prepare("eagle", load(TrainSettings, [config], given)).objective.drafter
    torch.nn.init.normal_(first.fusion.weight)
    folder = save_drafter(first, tmp_path / "drafter", Target.load(place / "target"))
    other = [*given, f"warm_start={folder}", "data.tokens=100"]  # would choose other ids
    parts = prepare("eagle", load(TrainSettings, [config], other))
    drafter = parts.objective.drafter
    assert torch.equal(drafter.ids, first.ids)
    for name, value in first.named_parameters():
        assert torch.equal(dict(drafter.named_parameters())[name], value)
    (line,) = [note for note in parts.notes if "warm start" in note]
    assert "not a resume: 10 of 10 tensors taken; optimizer, schedule and data order" in line
    smaller = prepare(
        "eagle", load(TrainSettings, [config], [*other, "drafter.draft_vocab_size=64"])
    )
    (line,) = [note for note in smaller.notes if "warm start" in note]
    assert "9 of 10 tensors taken, not head.weight;" in line
    with pytest.raises(UserError, match="nothing in this eagle fits a medusa"):
        prepare("medusa", load(TrainSettings, [], [*given, f"warm_start={folder}", "threads=1"]))


def test_dry_run_writes_nothing(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = settings(place, tmp_path / "out", "--dry-run")
    monkeypatch.setattr(sys, "argv", ["train_eagle.py", *given])
    with pytest.raises(SystemExit) as ended:
        main("eagle", "smoke/eagle.yaml", "Train.")
    assert ended.value.code == 0
    told = capsys.readouterr()
    assert "batch_tokens: 256" in told.out
    assert "first batch:" in told.out
    assert "parameters: " in told.out
    assert "memory from below: " in told.out
    assert "the schedule makes about 8 steps" in told.out
    assert "trainable parameters" in told.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_command_trains(place: Path, tmp_path: Path, family: str) -> None:
    assert train(family, place, tmp_path / "out") == str(tmp_path / "out" / "best")


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_the_project_s_own_configs_are_valid(place: Path, tmp_path: Path, config: str) -> None:
    script = ROOT / "training" / f"train_{SCRIPT_OF.get(config, config)}.py"
    file = f"configs/drafters/{config}.yaml"
    given = settings(place, tmp_path / "out", "threads=1", "--dry-run")
    assert "first batch:" in run(sys.executable, script, "--config", file, *given).stdout


@pytest.mark.slow
def test_help_shows_the_defaults() -> None:
    told = run(sys.executable, ROOT / "training" / "train_eagle.py", "--help").stdout
    assert "batch_tokens: 1024" in told
    assert "--dry-run" in told


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_two_processes_make_the_steps_of_two_batches(
    place: Path, tmp_path: Path, apart: bool
) -> None:
    """Two processes of `accelerate launch` on the CPU (gloo) equal one that accumulates two.

    Both write to one store of features. The same with the drafter in shares (FSDP), to the state
    that a run goes on from; and with the target on the disk, where each process reads its own.
    """
    config = ROOT / "configs" / "smoke" / "eagle.yaml"
    script = ROOT / "training" / "train_eagle.py"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    more = ["tracking.every=1", "evaluate.times=1"]
    if apart:
        more += ["spread.device_map=auto", "spread.max_memory={cpu: 100KiB}"]
    runs = ("one", "cpu", 1), ("two", "cpus", 2), ("shares", "cpus-fsdp", 2)
    for name, file, count in runs:
        start = [*launch, ROOT / "configs" / "accelerate" / f"{file}.yaml"]
        start += ["--num_processes", str(count)]
        given = settings(place, tmp_path / name, f"optim.accumulate={3 - count}", *more)
        if count == 2 and not apart:
            given += [f"features.store={tmp_path / 'features'}", "features.dtype=float32"]
        run(*start, script, "--config", config, *given)
    lines = [
        [json.loads(x) for x in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name, _, _ in runs
    ]
    assert apart or len(list((tmp_path / "features").glob("*.safetensors"))) >= 2
    losses = [[x["train/loss"] for x in side if "train/loss" in x] for side in lines]
    assert len(losses[0]) == 8
    one, *others = (load_file(tmp_path / name / STATE) for name, _, _ in runs)
    published = [load_file(tmp_path / name / "best" / "model.safetensors") for name, _, _ in runs]
    for other, drafter, found in zip(others, published[1:], losses[1:], strict=True):
        assert found == pytest.approx(losses[0], abs=5e-6)
        for key in (key for key in one if not key.startswith("generator")):
            torch.testing.assert_close(other[key], one[key], atol=1e-6, rtol=1e-5)
        for key, value in published[0].items():
            torch.testing.assert_close(drafter[key], value, atol=1e-4, rtol=0.01)  # in bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_goes_on(place: Path, tmp_path: Path, kind: signal.Signals) -> None:
    more = ("schedule.steps=40", "save_times=40", "evaluate.times=1")
    train("medusa", place, tmp_path / "straight", *more)
    output = tmp_path / "broken"
    command = [sys.executable, ROOT / "training" / "train_medusa.py", "--config"]
    command += [ROOT / "configs" / "smoke" / "medusa.yaml", *settings(place, output, *more)]
    broken = subprocess.Popen(
        [str(x) for x in command], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    published = output / "last" / "config.json"
    while broken.poll() is None and not published.exists():
        time.sleep(0.01)
    broken.send_signal(kind)
    broken.communicate(timeout=60)
    assert broken.returncode in (-9, 130, 143, 0)  # 0: it was done before the signal came
    assert load_drafter(output / "last", Target.load(place / "target"))
    train("medusa", place, output, *more, "resume=true")
    first, second = (
        load_file(tmp_path / x / "last" / "model.safetensors") for x in ("straight", "broken")
    )
    for key, value in first.items():
        assert torch.equal(second[key], value), key


@pytest.mark.slow
def test_wandb_without_a_login_stays_offline(place: Path, tmp_path: Path) -> None:
    """Every tracker gets curves, samples with accepted drafts marked, and the benchmark's table."""
    more = ["tracking.benchmark=configs/prompts/demo.jsonl", "evaluate.shape=gamma=2"]
    trackers = "tracking.trackers=[wandb,tensorboard,jsonl]"
    secret = "hf_NeverToBeSeen"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", secret)
        patch.setenv("WANDB_API_KEY", secret * 3)
        train("medusa", place, tmp_path / "out", trackers, *more)
    assert list((tmp_path / "out" / "wandb").glob("offline-run-*"))
    assert list((tmp_path / "out" / "drafters").glob("events.out.tfevents.*"))
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    assert any("train/loss" in one for one in logged)
    [measured, *_] = [one for one in logged if "tau" in one]
    assert "alpha/1" in measured
    [samples, *_] = [one["samples"] for one in logged if "samples" in one]
    assert set(samples[0]) == {"tau", "text"}
    [table] = [one["benchmark"] for one in logged if "benchmark" in one]
    assert [row["identical"] for row in table] == [None, 2]
    assert (tmp_path / "out" / "benchmark.json").exists()
    written = [file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert not any(secret.encode() in content for content in written)
    shown = b"".join(file.read_bytes() for file in (tmp_path / "out" / "drafters").rglob("*out*"))
    assert b"benchmark" in shown
    assert b"samples" in shown


def test_a_drafter_without_weights_cannot_be_trained(place: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no weights to train"):
        prepare("none", load(TrainSettings, [], settings(place, tmp_path / "out", "threads=1")))

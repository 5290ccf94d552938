"""scripts/generate.py as a person calls it, on a tiny target."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drafters import Target, load_drafter
from drafters.growth import Chain
from inference import generate
from inference.prompts import chat_ids
from tests.folders import save_tiny_target
from tests.scripts import Done, run_script
from training.commandline import spelt

ROOT = Path(__file__).parents[2]


def call(*options: str) -> Done:
    return run_script("generate.py", *options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=2)


@pytest.mark.slow
def test_one_json_object_that_python_reproduces(folder: Path) -> None:
    options = ("--prompt", "Hi the land", "--max-new-tokens", "12", "--temperature", "0.9")
    options += ("--drafter", "ngram:gamma=2")
    done = subprocess.run(
        [sys.executable, "scripts/generate.py", "--target", str(folder), "--json", *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    keys = ["ids", "text", "tau", "rounds", "finish_reason", "drafter", "draft_mode"]
    keys += ["verify_mode", "tokens_per_second", "seed", "versions"]
    assert list(result) == [*keys, "engine"]
    assert "torch" in result["versions"]
    assert result["drafter"] == "ngram:gamma=2"
    assert result["engine"] == "fast"
    assert (result["draft_mode"], result["verify_mode"]) == ("argmax", "lossless")
    target = Target.load(folder)
    ids = chat_ids(target, [{"role": "user", "content": "Hi the land"}])
    drafter, growth = load_drafter("ngram", target), Chain(2)
    sampled = {"max_new_tokens": 12, "temperature": 0.9}
    expected = generate(target, drafter, [ids], growth=growth, **sampled)[0]
    assert result["ids"] == expected.ids
    assert result["text"] == expected.text
    assert result["rounds"] == expected.rounds
    assert result["finish_reason"] == expected.finish_reason
    assert result["tau"] == (len(expected.ids) - 1) / expected.rounds
    assert result["tokens_per_second"] > 0


def test_streamed_text_is_the_text(folder: Path) -> None:
    options = ("--target", str(folder), "--prompt", "Hi", "--max-new-tokens", "40")
    result = json.loads(call(*options, "--json").stdout)
    streamed = call(*options)
    assert streamed.returncode == 0
    assert streamed.stdout == result["text"] + "\n"
    assert re.search(
        r"40 tokens, 39 rounds, tau 1\.00, [\d.]+ tokens/s on the fast engine, ended by length\n$",
        streamed.stderr,
    )


def test_accepted_drafts_are_marked(folder: Path) -> None:
    # a target that drafts for itself: every token but the prefill's and the bonuses is green
    options = ("--target", str(folder), "--drafter", f"{folder}:gamma=3", "--prompt", "Hi")
    done = call(*options, "--raw", "--max-new-tokens", "9", "--color")
    assert done.returncode == 0, done.stderr
    assert "tau 4.00" in done.stderr
    assert "\x1b[32m" in done.stdout
    plain = call(*options, "--raw", "--max-new-tokens", "9")
    assert "\x1b[" not in plain.stdout


def test_without_colours_accepted_drafts_are_marked_by_signs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    options = ("--target", str(folder), "--drafter", f"{folder}:gamma=3", "--prompt", "Hi", "--raw")
    done = call(*options, "--max-new-tokens", "9", "--color")
    assert "\x1b" not in done.stdout
    assert done.stdout.count("{+") == done.stdout.count("+}") > 0
    unmarked = call(*options, "--max-new-tokens", "9").stdout
    assert done.stdout.replace("{+", "").replace("+}", "") == spelt(unmarked)


def test_raw_text_system_messages_and_stops(folder: Path) -> None:
    options = ("--target", str(folder), "--prompt", "Hi", "--max-new-tokens", "12", "--json")
    outputs = [
        json.loads(call(*options, *more).stdout)["ids"]
        for more in ([], ["--chat"], ["--raw"], ["--system", "the end"])
    ]
    assert outputs[0] == outputs[1]
    assert len({tuple(ids) for ids in outputs}) == 3
    whole = json.loads(call(*options).stdout)["text"]
    wanted = next(c for c in whole if c.isascii() and c.isprintable())
    stopped = json.loads(call(*options, "--stop", wanted).stdout)
    assert stopped["finish_reason"] == "stop"
    assert wanted in stopped["text"]
    assert wanted not in stopped["text"][:-2]
    # the other forwards and bfloat16 answer too
    for engine in ("reference", "static"):
        found = json.loads(call(*options, "--engine", engine).stdout)
        assert (found["ids"], found["engine"]) == (outputs[0], engine)
    assert len(json.loads(call(*options, "--dtype", "bfloat16").stdout)["ids"]) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafter", "ngrm"], "error: no drafter is called 'ngrm' (did you mean ngram?)"),
        (["--drafter", "ngram:gamma=0"], "error: gamma is 0: give a whole number from 1 to 1024"),
        (["--temperature", "-1"], "error: temperature is -1.0: give 0 (greedy), or 1e-30 or more"),
        (["--max-new-tokens", "0"], "error: max_new_tokens is 0: give a whole number of 1 or more"),
        (["--json", "--color"], "error: --json and --color exclude each other"),
        (["--raw", "--system", "x"], "error: --system needs a chat"),
        (["--raw", "--prompt", ""], "error: the prompt '' has no tokens"),
        (["--dtype", "float8"], "error: Invalid value for '--dtype'"),
        (["--target", "nowhere"], "error: target nowhere: "),
        (["--prompt", "x" * 600], "error: a prompt has 6"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    folder: Path, options: list[str], message: str
) -> None:
    done = call("--target", str(folder), "--prompt", "Hi", *options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(message)
    assert "Traceback" not in done.stderr


def test_a_base_target_reads_text_as_it_is(tmp_path: Path) -> None:
    base = save_tiny_target(tmp_path / "base", template=False, num_hidden_layers=2)
    options = ("--target", str(base), "--prompt", "Hi", "--max-new-tokens", "4", "--json")
    assert call(*options).returncode == 0
    refused = call(*options, "--chat")
    assert refused.returncode == 2
    assert f"{base} has no chat template" in refused.stderr


def test_an_engine_that_cannot_be_had_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path, "gpt2", num_hidden_layers=1)
    options = ("--target", str(folder), "--prompt", "Hi", "--max-new-tokens", "3", "--json")
    refused = call(*options, "--engine", "fast")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"error: target {folder} cannot run on the fast engine: model")
    assert "model type gpt2 has no lean forward; give engine reference" in refused.stderr
    with pytest.warns(UserWarning, match="has no lean forward; using the reference engine"):
        chosen = call(*options)
    assert json.loads(chosen.stdout)["engine"] == "reference"

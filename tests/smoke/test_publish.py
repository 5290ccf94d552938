"""By the commands alone, from chats on: train, examine, measure, publish, load."""

import json
import random
import sys
from pathlib import Path

import pytest

from drafters.checkpoint import load_drafter
from drafters.target import Target
from tests.folders import save_tiny_target
from tests.scripts import Done, run_script
from training.run import main

WORDS = ["the", "and", "in", "an", "then", "thin", "anthem", "band", "hand", "sand"]


def write_chats(folder: Path) -> Path:
    source = random.Random(0)
    folder.mkdir()
    with (folder / "chats.jsonl").open("w") as stream:
        for number in range(40):
            asked, answered = (" ".join(source.choices(WORDS, k=k)) for k in (4, 9))
            messages = [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answered},
            ]
            stream.write(json.dumps({"id": f"chat-{number}", "messages": messages}) + "\n")
    (folder / "manifest.json").write_text(json.dumps({"settings": {}, "command": "by hand"}))
    return folder


def done(result: Done, code: int = 0) -> Done:
    assert result.returncode == code, result.stderr
    return result


@pytest.mark.slow
def test_from_chats_to_a_published_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("inference.bench._COST_SAMPLES", 1)
    target = save_tiny_target(tmp_path / "target", num_hidden_layers=8)
    chats, out = write_chats(tmp_path / "chats"), tmp_path / "run"
    given = [f"target={target}", f"data.path={chats}", f"output={out}"]
    monkeypatch.setattr(sys, "argv", ["train_eagle.py", *given])
    with pytest.raises(SystemExit):
        main("eagle", "smoke/eagle.yaml", "Train.")
    capsys.readouterr()
    best = out / "best"
    where = ("--target", str(target), "--drafter", str(best))
    healthy = done(run_script("doctor.py", *where, "--limit", "4", "--max-new-tokens", "16"))
    assert "rendered as in training" in healthy.stdout
    prompts = tmp_path / "set.jsonl"
    prompts.write_text('{"question_id": 1, "category": "chat", "turns": ["in the sand"]}\n')
    quick = ("--max-new-tokens", "6", "--repeats", "1", "--warmup", "1", "--out", str(out))
    measured = run_script("benchmark.py", *where, "--prompts", str(prompts), *quick)
    assert measured.returncode in (0, 1)  # so few tokens say nothing of speed
    to = tmp_path / "published"
    measure = ("--benchmark", str(out / "benchmark.json"))
    done(run_script("publish.py", str(best), "--to", str(to), *measure))
    card = (to / "README.md").read_text()
    assert "| chain 4 | lossless |" in card
    assert "optimizer steps. On held-out chats: loss" in card
    assert "epochs:" in card  # of the run's resolved settings
    assert json.loads((to / "data_manifest.json").read_text())["command"] == "by hand"
    load_drafter(to, Target.load(target))
    again = ("--target", str(target), "--drafter", str(to), "--limit", "3")
    done(run_script("doctor.py", *again, "--max-new-tokens", "16"))

"""Tokens of the environment are written nowhere: not by trackers, runs, cards or messages."""

import json
import sys
from pathlib import Path

import pytest

from tests.folders import save_tiny_target
from tests.scripts import run_script
from tests.smoke.test_publish import write_chats
from training.run import main

SECRETS = {
    "HF_TOKEN": "hf_aVerySecretToken0123",
    "WANDB_API_KEY": "0123456789abcdef" * 2 + "feedbeef",
}


def test_tokens_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    target = save_tiny_target(tmp_path / "target", num_hidden_layers=8)
    out = tmp_path / "run"
    given = [f"target={target}", f"data.path={write_chats(tmp_path / 'chats')}", f"output={out}"]
    given += ["schedule.steps=2", "evaluate.times=1", "tracking.trackers=[jsonl,wandb]"]
    monkeypatch.setattr(sys, "argv", ["train_eagle.py", *given])
    with pytest.raises(SystemExit) as ended:
        main("eagle", "smoke/eagle.yaml", "Train.")
    assert ended.value.code == 0
    told = run_script("publish.py", str(out / "best"), "--to", str(tmp_path / "published"))
    assert told.returncode == 0, told.stderr
    said = "".join([*capfd.readouterr(), told.stdout, told.stderr])
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any("wandb" in str(file) for file in files)
    for secret in SECRETS.values():
        assert secret not in said
        assert not [file for file in files if secret.encode() in file.read_bytes()]
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    assert {"torch", "transformers"} <= set(config["training"]["versions"])
    assert "seed" in config["training"]

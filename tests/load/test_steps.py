"""The parts of a training step are timed, and none is left out."""

import json
from pathlib import Path

import pytest

from tests.folders import save_tiny_target
from tests.load import steps
from tests.scripts import SCRIPTS

CONFIG = str(SCRIPTS.parent / "configs" / "smoke" / "eagle.yaml")


def test_every_part_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_tiny_target(tmp_path / "target", num_hidden_layers=8)
    chats = tmp_path / "chats.jsonl"
    said = ({"prompt": f"number {n}", "response": "one two three " * 4} for n in range(8))
    chats.write_text("".join(json.dumps(one) + "\n" for one in said))
    given = [f"target={target}", f"data.path={chats}", f"output={tmp_path / 'unused'}"]
    steps.main(["eagle", "--config", CONFIG, "--steps", "2", *given])
    printed = capsys.readouterr().out
    assert all(part in printed for part in steps.PARTS)
    assert "tokens/s in the first pass" in printed
    assert not (tmp_path / "unused").exists()

"""scripts/preview_data.py as a person calls it, on a tiny target."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.folders import save_tiny_target, tiny_tokenizer
from tests.scripts import SCRIPTS, run_script
from training.examples import Example
from training.preview import LEARNED, coloured, coverages, first_target


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preview")
    save_tiny_target(folder / "target", num_hidden_layers=1)
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"the {n}"},
                {"role": "assistant", "content": "and"},
            ]
        }
        for n in range(30)
    ]
    silent = {"messages": [{"role": "user", "content": "Hi"}]}
    (folder / "chats.jsonl").write_text("\n".join(json.dumps(x) for x in [*chats, silent]))
    return folder


def options(place: Path, *more: str) -> list[str]:
    data = place / "chats.jsonl"
    return ["--target", str(place / "target"), "--data", str(data), "--show", "1", *more]


def test_what_is_learned_dropped_and_covered(place: Path) -> None:
    done = run_script("preview_data.py", *options(place, "--vocabularies", "4,265"))
    assert done.returncode == 0, done.stderr
    assert "<|im_start|>user" in done.stdout
    assert "31 chats read, 30 examples kept" in done.stdout
    assert "dropped: 1 without an answer" in done.stdout
    assert "60 learned" in done.stdout  # "and" is one token, its ending another
    rows = [line for line in done.stdout.splitlines() if "of 5" in line]
    assert ["100.00%" in row for row in rows] == [True, True]


def test_packed_rows_are_counted(place: Path) -> None:
    given = options(place, "data.pack=true", "data.max_length=64")
    done = run_script("preview_data.py", *given)
    assert "rows of up to 64 tokens" in done.stdout


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["loss.kind=kl"], "only data.key=value can be set here"),
        (["--vocabularies", "some"], "give sizes such as 4096,8192"),
        (["data.max_length=3"], "nothing to learn from"),
        (["--target", "/nowhere"], "target '/nowhere':"),
    ],
)
def test_a_mistake_is_one_line(place: Path, more: list[str], said: str) -> None:
    done = run_script("preview_data.py", *options(place, *more))
    assert done.returncode == 2
    assert said in done.stderr


def test_coverage_is_a_ceiling_on_alpha() -> None:
    def chat(*ids: int) -> Example:
        return Example("x", torch.tensor([9, *ids]), torch.tensor([False, *[True] * len(ids)]))

    found = coverages([chat(1, 1, 1, 2, 2, 3)], [chat(1, 2, 3, 4)], 10, {0}, [3, 4, 99])
    assert [(c.size, c.training, c.held_out) for c in found] == [(3, 5 / 6, 1 / 2), (4, 1.0, 3 / 4)]
    assert found[0].ceiling(2) == 1.75


def test_only_what_is_learned_is_coloured() -> None:
    ids = torch.tensor(tiny_tokenizer()("the hand")["input_ids"])
    example = Example("x", ids, torch.arange(len(ids)) >= 2)
    text = coloured(example, tiny_tokenizer())
    assert text.plain == "the hand"
    learned = [text.plain[s.start : s.end] for s in text.spans if s.style == LEARNED]
    assert learned == [tiny_tokenizer().decode(ids[2:])]
    assert first_target(example) == 1
    marked = coloured(example, tiny_tokenizer(), colours=False).plain
    assert marked == f"{tiny_tokenizer().decode(ids[:2])}{{+{learned[0]}+}}"


@pytest.mark.slow
def test_the_command(place: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "preview_data.py"), *options(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ceiling on alpha" in done.stdout

"""README.md and docs/*.md are followed: their commands and their Python run, on a tiny target."""

import json
import random
import re
import shutil
from contextlib import chdir
from pathlib import Path

import pytest

from drafters import Target
from drafters.checkpoint import save_drafter
from drafters.registry import build_drafter
from drafters.settings import configs_dir
from tests.blocks import DOCUMENTS, ROOT, Block, blocks, commands, script_of
from tests.folders import save_tiny_target
from tests.scripts import run_script

# What makes a command quick here; the last of an option or setting that is given twice counts.
QUICK_TRAINING = (
    "schedule.epochs=null schedule.steps=2 schedule.time_budget=null drafter.draft_vocab_size=64 "
    "data.batch_tokens=256 data.held_out=0.2 evaluate.times=1 evaluate.tokens=64 "
    "evaluate.prompts=1 evaluate.new_tokens=6 threads=1"
)
QUICK = {
    "benchmark.py": "--limit 1 --max-new-tokens 6 --repeats 1 --warmup 0",
    "generate.py": "--max-new-tokens 6",
    "tune.py": "--limit 1 --max-new-tokens 6 --samples 1 --rows 1 --contexts 20 --depth 2",
    "search_tree.py": "--limit 1 --max-new-tokens 6 --nodes 2",
    "doctor.py": "--limit 1 --max-new-tokens 6",
    "make_chats.py": "--tokens 30 --max-new-tokens 12 --max-looped 1 --rows 4",
    "store_features.py": QUICK_TRAINING,
    "preview_data.py": "--show 1",
}
PROMPTS = ("questions.jsonl", "mine.jsonl")
DRAFTERS = ("runs/demo/eagle/best", "runs/eagle/best")
# The chats that ship are another tokenizer's ids, and the target here has 8 layers.
HERE = {"configs/chats": "chats", "1,14,28": "1,3,4"}
# Exit codes 1 that tell of the tiny random target and drafter, not of the command.
MAY_FIND_FAULT = {"benchmark.py", "doctor.py"}


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a reader has it: a target, drafters that were trained, chats, questions."""
    monkeypatch.setattr("inference.bench._COST_SAMPLES", 1)
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = save_tiny_target(
        tmp_path / "T", num_hidden_layers=8, hidden_size=32, intermediate_size=32
    )
    target = Target.load(str(folder))
    made = build_drafter("eagle", {"draft_vocab_size": 64}, target.shape)
    made.init_from(target)
    for place in DRAFTERS:
        save_drafter(made, tmp_path / place, target)
    source = random.Random(0)
    lines = []
    for number in range(40):
        ids = source.choices(range(3, target.shape.vocab_size), k=24)
        lines.append(
            json.dumps(
                {"id": f"chat-{number}", "ids": ids, "label_mask": [False] * 8 + [True] * 16}
            )
        )
    for place in ("runs/chats", "chats"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "chats.jsonl").write_text("\n".join(lines))
    demo = (configs_dir() / "prompts" / "demo.jsonl").read_text().splitlines()[:4]
    for name in PROMPTS:
        (tmp_path / name).write_text("\n".join(demo))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    foreign = ("--to", "vllm", "--out", str(tmp_path / "DOWNLOADED"))
    assert run_script("export.py", str(tmp_path / DRAFTERS[0]), *foreign).returncode == 0
    return tmp_path


def substituted(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = re.sub(rf"\${name}\b", value, word)
    for given, here in HERE.items():
        word = word.replace(given, here)
    return word


def follow(block: Block, values: dict[str, str]) -> None:
    for words in commands(block):
        if re.fullmatch(r"[A-Z]+=[^$]*", words[0]):
            name, _, value = words[0].partition("=")
            values[name] = value
        found = script_of(words)
        if found is None or "fetch_target" in found[0]:
            continue
        script, arguments = found
        trained = script.startswith("../training/")
        extra = QUICK_TRAINING if trained else QUICK.get(script, "")
        given = [*(substituted(word, values) for word in arguments), *extra.split()]
        if script == "make_chats.py" and "--prompts" not in given:
            given += ["--prompts", PROMPTS[0]]  # a random target's user hardly ever ends
        if out := next((w.removeprefix("output=") for w in given if w.startswith("output=")), None):
            shutil.rmtree(out, ignore_errors=True)
        if "--out" in given:
            place = Path(given[given.index("--out") + 1])
            if script in ("make_chats.py", "export.py"):
                shutil.rmtree(place, ignore_errors=True)
        done = run_script(script, *given)
        allowed = {0, 1} if script in MAY_FIND_FAULT else {0}
        assert done.returncode in allowed, (words, done.stderr)
        if trained and out:  # what was just trained serves the commands that follow
            assert (Path(out) / "best").is_dir()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_can_be_followed(document: Path, sandbox: Path) -> None:
    values = {"T": str(sandbox / "T")}
    names: dict[str, object] = {}
    with chdir(sandbox):
        for block in blocks(document):
            if block.reason is None and block.language == "sh":
                follow(block, values)
            elif block.reason is None and block.language == "python":
                text = substituted(block.text.replace("path/or/hub-id", values["T"]), values)
                exec(compile(text, str(block), "exec"), names)

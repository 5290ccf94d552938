"""The documentation's own drafter keeps the contract that the library's families keep."""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest

from drafters import registry
from drafters.base import Drafter
from drafters.errors import UserError
from drafters.growth import Chain
from drafters.registry import build_drafter, load_plugin, methods
from drafters.target import Target
from inference import generate
from tests.tiny import tiny_target
from tests.unit import test_every_drafter as contract

ROOT = Path(__file__).parents[2]
PLUGIN = str(ROOT / "examples" / "bigram.py")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """No other test sees a plugin."""
    with patch.dict(registry._METHODS), patch.dict(sys.modules):
        yield


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(**contract.SIZES)


@pytest.fixture(scope="module")
def truth(target: Target) -> list[list[int]]:
    plain = build_drafter("none", {}, target.shape)
    outputs = generate(target, plain, contract.PROMPTS, max_new_tokens=16)
    return [output.ids for output in outputs]


@pytest.fixture
def drafter(target: Target, truth: list[list[int]]) -> Drafter:
    """A table that is often right: of the texts that will be decoded."""
    load_plugin(PLUGIN)
    after = {a: b for ids in truth for a, b in pairwise(ids)}
    return methods()["bigram"](after)


@pytest.mark.parametrize("growth", contract.GROWTHS[:2], ids=str)
def test_the_contract(
    drafter: Drafter, growth: registry.Any, target: Target, truth: list[list[int]]
) -> None:
    contract.test_greedy_output_is_the_targets_own(drafter, growth, target, truth)
    contract.test_a_row_is_what_it_is_alone(drafter, growth, target)
    contract.test_proposals_depend_on_the_text_alone(drafter, growth, target)


def test_it_is_accepted(drafter: Drafter, target: Target, truth: list[list[int]]) -> None:
    outputs = generate(target, drafter, contract.PROMPTS, growth=Chain(2), max_new_tokens=16)
    assert [output.ids for output in outputs] == truth
    assert max(output.tau for output in outputs) > 1.5


def test_it_counts_chats(tmp_path: Path) -> None:
    load_plugin(PLUGIN)
    chats = tmp_path / "chats.jsonl"
    rows = [[1, 2, 3, 1, 2, 4], [1, 5, 2, 4]]
    lines = [{"ids": ids, "label_mask": [True] * len(ids)} for ids in rows]
    chats.write_text("\n".join(map(json.dumps, lines)))
    shape = tiny_target(**contract.SIZES).shape
    made = build_drafter("bigram", {"chats": str(chats)}, shape)
    assert made.after == {1: 2, 2: 4, 3: 1, 5: 2}
    assert made.options() == {"chats": str(chats)}
    with pytest.raises(UserError, match="has no option 'chat'"):
        build_drafter("bigram", {"chat": "x"}, shape)


def test_its_size() -> None:
    assert len(Path(PLUGIN).read_text().splitlines()) <= 150


def test_bad_plugins(tmp_path: Path) -> None:
    empty, taken, broken = (tmp_path / f"{name}.py" for name in ("empty", "taken", "broken"))
    empty.write_text("")
    taken.write_text(
        "from drafters.registry import register\n\n\n@register\nclass A:\n    name = 'ngram'\n"
    )
    broken.write_text("1 / 0")
    known = methods()
    for file, said in (
        (empty, "registers no drafter"),
        (taken, "takes the name 'ngram'"),
        (broken, "ZeroDivisionError"),
        (tmp_path / "none.py", "FileNotFoundError"),
    ):
        with pytest.raises(UserError, match=said):
            load_plugin(str(file))
    with pytest.raises(UserError, match="No module named 'nothing_here'"):
        load_plugin("nothing_here")
    assert methods() == known


@pytest.mark.slow
def test_a_command_takes_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/benchmark.py", "--plugin", PLUGIN, "--list"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "bigram" in done.stdout.split()

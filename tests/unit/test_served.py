"""Serving in foreign engines: what is counted, and what is said where an engine is not there."""

import json
import sys
from pathlib import Path
from typing import cast

import pytest

from drafters.base import Drafter
from drafters.errors import UserError
from drafters.formats.registry import writer
from drafters.formats.served import SERVED, serving
from inference.generate import Output
from inference.served import ENGINES, Engine, ForeignEngine, Job, Served
from inference.served.comparison import (
    Decoded,
    acceptance,
    decode,
    engine_facts,
    same_drafts,
    sameness,
)
from tests.tiny import ScriptedDrafter, prompts_of, tiny_target

JOB = Job(Path("t"), [[1, 2, 3]], 4, "float32", 1, Path("d"), "kind", 2)


def test_every_way_to_serve_has_a_writer_and_an_engine() -> None:
    assert set(ENGINES) == set(ForeignEngine)  # what commands name is what can run
    for (engine, family), way in SERVED.items():
        assert engine in ENGINES
        assert writer(way.format, family).write is not None
    with pytest.raises(
        UserError, match=r"vllm serves no hydra .* give one of dflash, dspark, eagle"
    ):
        serving("vllm", "hydra")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_is_not_built_is_one_line(engine: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="make engines"):
        Engine(engine, tmp_path)
    with pytest.raises(UserError, match=r"give vllm or llama\.cpp"):
        Engine("sglang", tmp_path)


def engine_that(tmp_path: Path, body: str) -> Path:
    """Stand in for vLLM's interpreter."""
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!{sys.executable}\nimport json, sys\n{body}")
    python.chmod(0o755)
    return tmp_path


def test_a_job_goes_out_whole_and_an_answer_comes_back(tmp_path: Path) -> None:
    answer = {"version": "v", "outputs": [[5, 6]], "seconds": 0.5, "rounds": 2, "drafted": 4}
    body = (
        "job = json.load(sys.stdin)\n"
        "assert job['drafter'] == 'd' and job['prompts'] == [[1, 2, 3]] and job['gamma'] == 2\n"
        f"open(sys.argv[2], 'w').write({json.dumps(json.dumps(answer))})\n"
    )
    served = Engine("vllm", engine_that(tmp_path, body)).run(JOB)
    assert served == Served("v", [[5, 6]], 0.5, 2, 4)
    assert served.tokens_per_second == 4.0


def test_what_an_engine_refuses_is_named(tmp_path: Path) -> None:
    body = "print('noise', file=sys.stderr); raise NotImplementedError('no such head')\n"
    with pytest.raises(UserError, match="vLLM refused kind: NotImplementedError: no such head"):
        Engine("vllm", engine_that(tmp_path, body)).run(JOB)


def test_an_error_in_a_process_of_the_engines_is_named_by_its_root(tmp_path: Path) -> None:
    prefix = "(EngineCore pid=7) ERROR 11-30 10:12:10 [core.py:1100]"
    body = (
        f"print('{prefix} Traceback (most recent call last):')\n"
        f"print('{prefix}     assert rows == size')\n"
        f"print('{prefix} AssertionError')\n"
        "raise RuntimeError('Engine core initialization failed. See root cause above.')\n"
    )
    with pytest.raises(UserError, match="refused kind: AssertionError: assert rows == size"):
        Engine("vllm", engine_that(tmp_path, body)).run(JOB)


def test_what_a_checked_setting_says_is_below_it(tmp_path: Path) -> None:
    said = "1 validation error for VllmConfig\\n  Value error, no such runner [type=value_error]"
    body = f"class ValidationError(Exception): pass\nraise ValidationError('{said}')\n"
    with pytest.raises(UserError, match=r"for VllmConfig: Value error, no such runner"):
        Engine("vllm", engine_that(tmp_path, body)).run(JOB)


def test_acceptance_by_position_and_tau() -> None:
    ours = [Output(ids=[1, 2, 3, 4], accepted=[2, 0]), Output(ids=[1, 2], accepted=[1])]
    assert acceptance(ours, 3) == [2 / 3, 1 / 3, 0.0]
    counted = Served("v", [[1] * 7], 1.0, rounds=3, drafted=6, accepted=3, accepted_at=[2, 1])
    facts = engine_facts(counted, 2)
    assert (facts["tau"], facts["acceptance"]) == (2.0, [2 / 3, 1 / 3])
    # without a count of rounds: six tokens behind the first, three of them drafts, so three rounds
    silent = Served("v", [[1] * 7], 1.0, drafted=6, accepted=3)
    assert (engine_facts(silent, 2)["tau"], engine_facts(silent, 2)["acceptance"]) == (2.0, None)


def test_texts_that_part_are_near_ties_or_different() -> None:
    target = tiny_target()
    prompts = [[1, 2, 3], [4, 5]]
    assert sameness(target, prompts, [[7, 8], [9]], [[7, 8], [9]]) == {
        "equal": 2,
        "near_ties": 0,
        "different": 0,
    }
    assert sameness(target, prompts, [[7, 8], [9]], [[7, 9], [9]])["different"] == 1


def test_drafts_are_compared_where_the_same_tokens_came_before() -> None:
    ours = Decoded(
        [Output(ids=[1, 2, 3, 4]), Output(ids=[5, 6])], [{1: [2, 9], 3: [4]}, {1: [6, 7]}]
    )
    rounds = [[([2, 9], [2, 3]), ([4, 8], [4, 8, 7])], [([6, 7], [6, 5])]]
    served = Served("v", [[1, 2, 3, 4], [5, 6]], 1.0, by_round=rounds)
    assert same_drafts(ours, served) == {"rounds": 3, "met": 3, "equal": 3}
    rounds[0][1] = ([5, 8], [4])
    rounds[1].insert(0, ([6, 7], [6]))
    assert same_drafts(ours, served) == {"rounds": 4, "met": 3, "equal": 2}
    served.outputs[1][0] = 4
    assert same_drafts(ours, served) == {"rounds": 4, "met": 2, "equal": 1}
    assert same_drafts(ours, Served("v", [], 1.0)) is None


def test_decoding_here_keeps_what_was_drafted() -> None:
    target, prompts = tiny_target(), prompts_of(3)
    wrong = cast(Drafter, ScriptedDrafter([[0] * 8]))
    text = decode(target, wrong, prompts, 2, 6).outputs[0].ids
    right = cast(Drafter, ScriptedDrafter([text]))
    outputs, drafts = decode(target, right, prompts, 2, 6)
    assert outputs[0].ids == text
    assert drafts == [{1: text[1:3], 4: text[4:5]}]

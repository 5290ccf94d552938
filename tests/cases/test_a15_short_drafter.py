"""A15: a benchmark shows the rounds in which a text had outgrown the drafter's context.

That outputs stay the target's own, with one warning, is in tests/unit/test_draft_model.py.
"""

from pathlib import Path

import pytest

from drafters.target import Target
from inference.bench import BenchSettings, contenders, measure
from inference.prompts import Prompt
from inference.spec import Spec
from inference.summary import summarise
from tests.folders import VOCAB_SIZE, save_tiny_target, tiny_tokenizer
from tests.tiny import tiny_model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no lean forward")
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a15_the_benchmark_shows_the_fallback(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.bench._COST_SAMPLES", 1)
    target = Target(tiny_model(vocab_size=VOCAB_SIZE), tiny_tokenizer(), name="tiny")
    folder = save_tiny_target(tmp_path, family, max_position_embeddings=32, num_hidden_layers=1)
    race = contenders(target, [Spec.parse(f"{folder}:gamma=3")])
    settings = BenchSettings(max_new_tokens=64, repeats=1, warmup=0)
    with pytest.warns(UserWarning, match="outgrew the drafter's context"):
        measured = measure(target, race, [Prompt("1", "chat", ("in the end",))], settings)
    (found,) = summarise(measured, "prompts")["drafters"]
    assert found["identical"] == 1
    assert 30 < found["rounds_without_draft"] < found["rounds"]

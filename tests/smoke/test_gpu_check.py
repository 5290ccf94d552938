"""scripts/gpu_check.py on a CPU, at a tiny size."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from drafters.growth import Chain
from inference.counting import count, counting_target
from inference.generate import generate
from inference.scripted import ScriptedDrafter
from tests.folders import save_tiny_target
from tests.scripts import Done, run_script
from tests.tiny import prompts_of

QUICK = ("--device", "cpu", "--size", "tiny", "--max-new-tokens", "8", "--repeats", "1")


@pytest.fixture(autouse=True)
def _few_cost_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.bench._COST_SAMPLES", 1)


def call(out: Path, *options: str) -> Done:
    return run_script("gpu_check.py", *QUICK, "--limit", "1", "--out", str(out), *options)


@pytest.mark.slow
def test_everything_runs_on_a_cpu(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "target", num_hidden_layers=2)
    done = call(tmp_path / "out", "--target", str(folder), "--alpha", "1")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert len(result["cases"]) == 3 * 3 * 2
    assert all(case["failures"] == [] for case in result["cases"])
    exact = [case for case in result["cases"] if case["dtype"] == "float32"]
    assert all(one["identical"] == 3 for case in exact for one in case["outputs"].values())
    names = ["counting fast", "counting static", "target fast", "target static"]
    assert list(result["benchmarks"]) == names
    for name in names[:2]:
        part = result["benchmarks"][name]
        assert part["target"]["dtype"] == "bfloat16"
        assert part["target"]["engine"] == name.split()[1]
        # the script is right throughout: 7 tokens after the prefill's, in the fewest rounds
        assert [one["alpha"] for one in part["drafters"]] == [1.0] * 3
        assert [one["identical"] for one in part["drafters"]] == [1] * 3
        assert "64" in part["verify_cost_wide"]
    assert "tree error" in done.stdout
    assert "scripted" in done.stdout
    assert "none over it" in done.stdout


def test_a_counting_target_counts_whatever_drafts() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        target = counting_target("tiny", dtype=dtype, device="cpu")
        size = target.shape.vocab_size
        prompts = [*prompts_of(20, 3, vocab_size=size), [size - 2]]
        for alpha, tau in ((1.0, 4.0), (0.0, 1.0)):
            script = ScriptedDrafter(partial(count, size), alpha, size)
            outputs = generate(target, script, prompts, growth=Chain(3), max_new_tokens=9)
            assert [o.ids for o in outputs] == [count(size, prompt, 9) for prompt in prompts]
            assert all(output.tau == tau for output in outputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "9b"], "error: size is '9b': give tiny, 1b, 8b"),
        (["--device", "cuda"], "error: device is 'cuda' and torch sees no GPU here: give cpu"),
        (["--alpha", "2"], "error: alpha is 2.0: give 0 to 1"),
        (["--prompts", "none.jsonl"], "error: none.jsonl cannot be read"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], message: str, tmp_path: Path) -> None:
    if options[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = call(tmp_path / "out", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)

"""Values that once gave a traceback, or a line that blamed something else."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.growth import Chain
from drafters.growth.ranks import read_paths
from drafters.methods.none import NoDrafter
from drafters.rules import Rules
from drafters.sampling import Warp
from drafters.target import Target
from drafters.untrusted import read_object
from inference import Sampling, generate, report
from inference.prompts import chat_ids, read_prompts, text_ids
from tests.folders import save_tiny_target, tiny_tokenizer
from tests.tiny import tiny_model, tiny_target
from training.lesson_settings import OnPolicySettings
from training.options import EvaluateSettings
from training.sources import given_texts

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize("value", [NAN, INFINITE, -1.0])
def test_a_temperature_is_finite(value: float) -> None:
    with pytest.raises(UserError, match="temperature is"):
        Warp(value)


def test_a_temperature_of_training_is_named() -> None:
    with pytest.raises(UserError, match=r"evaluate\.temperatures is -1\.0: give 0 \(greedy\)"):
        EvaluateSettings(temperatures=[0.0, -1.0])
    for value in (0.0, -1.0, NAN):
        with pytest.raises(UserError, match=rf"on_policy\.temperature is {value}: give 1e-30"):
            OnPolicySettings(temperature=value)


@pytest.mark.parametrize("value", [NAN, INFINITE])
@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalty_is_finite(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{name} is"):
        Rules(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [2**64, -(2**63), 10**30])
def test_a_seed_that_no_generator_holds(seed: int) -> None:
    with pytest.raises(UserError, match=f"seed is {seed}"):
        Sampling(seed=seed)


@pytest.mark.parametrize("string", ["", "caf\udce9", 3])
def test_a_stop_string_that_is_no_text(string: str) -> None:
    """An empty one ended every output; bytes that are no UTF-8 ended the run in its middle."""
    with pytest.raises(UserError, match=r"a stop string .*: give "):
        Sampling(stop_strings=("end", string))


@pytest.mark.parametrize("name", ["max_new_tokens", "seed"])
def test_what_is_counted_is_whole(name: str) -> None:
    with pytest.raises(UserError, match=rf"{name} is 2\.5"):
        Sampling(**{name: 2.5})  # type: ignore[arg-type]


def test_a_temperature_that_overflows_blames_no_target() -> None:
    logits = torch.tensor([[30000.0, -30000.0]])
    assert Warp(1e-30).laws(logits).probs.tolist() == [[1, 0]]
    with pytest.raises(UserError, match="temperature is 1e-38"):
        Warp(1e-38)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"drafter": "ngram"}, "drafter is 'ngram': give what load_drafter"),
        ({"growth": "chain"}, "growth is 'chain': give drafters.growth.Chain"),
        ({"rules": {}}, "rules is {}: give drafters.rules.Rules"),
        ({"temperature": "0.7"}, "temperature is '0.7': give a number"),
        ({"top_k": None}, "top_k is None: give a whole number"),
        ({"top_k": 2.5}, "top_k is 2.5: give a whole number"),
        ({"seed": "5"}, "seed is '5': give a whole number from"),
        ({"max_new_tokens": "5"}, "max_new_tokens is '5': give a whole number of 1 or more"),
        ({"eos_ids": "</s>"}, "eos_ids is .*: give token ids"),
        ({"eos_ids": 5.5}, "eos_ids is 5.5: give token ids"),
        ({"eos_ids": [[5]]}, r"eos_ids is \[\[5\]\]: give token ids"),
        ({"verify": 5}, "verify is 5: give"),
        ({"verify": ["block"]}, r"verify is \['block'\]: give"),
        ({"drafter": NoDrafter}, "drafter is <class .*: give what load_drafter"),
        ({"growth": Chain}, "growth is <class .*: give drafters.growth.Chain"),
        ({"stop_strings": None}, "stop_strings is None: give texts"),
        ({"stop_strings": 5}, "stop_strings is 5: give texts"),
        ({"stop_strings": "end"}, "tiny-llama has no tokenizer to find stop_strings with"),
    ],
)
def test_a_value_of_another_kind(values: dict, said: str) -> None:
    given = {"drafter": NoDrafter(), "max_new_tokens": 2, **values}
    with pytest.raises(UserError, match=said):
        generate(tiny_target(), given.pop("drafter"), [[5]], **given)


@pytest.mark.parametrize("given", [None, "T", Path("T")])
def test_what_is_no_target(given: object) -> None:
    with pytest.raises(UserError, match=r"target is .*: give what Target\.load made"):
        generate(given, NoDrafter(), [[5]])  # type: ignore[arg-type]
    if given is not None:
        with pytest.raises(UserError, match=r"target is .*: give what Target\.load made"):
            load_drafter("none", given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, 5, b"T"])
def test_what_is_no_folder(given: object) -> None:
    with pytest.raises(UserError, match=r"target is .*: give a folder"):
        Target.load(given)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"drafter is .*: give a folder"):
        load_drafter(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float99", "nn", "int8", None])
def test_what_is_no_dtype(dtype: object, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dtype is .*: give float32 or bfloat16"):
        Target.load(tmp_path, dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"repetition_penalty": "x"}, "repetition_penalty is 'x': give a number"),
        ({"presence_penalty": None}, "presence_penalty is None: give a number"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]: give"),
        ({"logit_bias": {5: 1.0}}, r"logit_bias holds 5: give a sequence of ids, of one token"),
        ({"logit_bias": {"ab": 1.0}}, "logit_bias holds 'ab': give a sequence of ids"),
        ({"logit_bias": {(5.5,): 1.0}}, r"logit_bias holds \(5\.5,\): give token ids"),
        ({"logit_bias": {(5,): "x"}}, "logit_bias holds 'x': give a number"),
        ({"logit_bias": {(5,): NAN}}, "logit_bias holds nan: give a number; -inf forbids"),
        ({"logit_bias": {(5,): INFINITE}}, "logit_bias holds inf: give a number; -inf forbids"),
        ({"bad_words": [5]}, "bad_words holds 5: give a sequence of ids"),
        ({"bad_words": ["abc"]}, "bad_words holds 'abc': give a sequence of ids"),
        ({"bad_words": None}, "bad_words is None: give a list of sequences"),
        ({"allowed": "x"}, "allowed is 'x': give a function"),
    ],
)
def test_rules_that_are_none(values: dict, said: str) -> None:
    """NaN and infinity as a bias had the target blamed; the others ended in a traceback."""
    with pytest.raises(UserError, match=said):
        Rules(**values)


def test_a_bias_may_forbid_a_token() -> None:
    target = tiny_target()
    (plain,) = generate(target, NoDrafter(), [[5]], max_new_tokens=1)
    rules = Rules(logit_bias={tuple(plain.ids): -INFINITE})
    (other,) = generate(target, NoDrafter(), [[5]], max_new_tokens=1, rules=rules)
    assert other.ids != plain.ids


@pytest.mark.parametrize("ids", [[-1], [128], []])
def test_what_a_constraint_allows_does_not_count_from_the_end(ids: list[int]) -> None:
    """An id of -1 was taken for the vocabulary's last."""
    rules = Rules(allowed=lambda _: ids)
    with pytest.raises(UserError, match="the rules leave no token"):
        generate(tiny_target(), NoDrafter(), [[5]], max_new_tokens=2, rules=rules)


def test_stop_strings_are_not_letters() -> None:
    with pytest.raises(UserError, match=r"stop_strings is one text: give \('end',\)"):
        Sampling(stop_strings="end")  # type: ignore[arg-type]


def test_half_a_character_is_no_prompt() -> None:
    """What a shell passes on of bytes that are no UTF-8, and JSON of an escape that is half one."""
    target = Target(tiny_model(vocab_size=265, num_hidden_layers=1), tiny_tokenizer())
    for read in (
        lambda text: text_ids(target, text),
        lambda text: chat_ids(target, [{"role": "user", "content": text}]),
        lambda text: generate(target, NoDrafter(), [text]),
    ):
        with pytest.raises(UserError, match=r"no character after .*caf"):
            read("caf\udce9")


@pytest.mark.parametrize(
    "read",
    [read_prompts, given_texts, read_paths, read_object, report.read],
    ids=lambda x: x.__name__,
)
def test_a_file_without_end_does_not_fill_the_memory(
    read: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_LARGEST", 2**20)
    with pytest.raises(UserError, match=r"has (a line of )?more than"):
        read(Path("/dev/zero"))


@pytest.mark.parametrize("place", ["nowhere", "a file", "", "a/b/c", "./x"])
def test_a_target_that_is_not_there(place: str, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    given = str(tmp_path / place) if place in ("nowhere", "a file") else place
    with pytest.raises(UserError, match="no such folder; give a folder"):
        Target.load(given)


def test_a_config_of_a_larger_model_than_its_weights(tmp_path: Path) -> None:
    """Left to itself transformers fills the seven billion values that it says at random."""
    folder = save_tiny_target(tmp_path)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"a model of 6,738,415,616 values and the weights"):
        Target.load(folder)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ("Once", "prompts is one text"),
        (None, "prompts is None: give a list of prompts"),
        (5, "prompts is 5: give a list of prompts"),
        ([[5, 128]], "id 128: give 0 to 127"),
        ([[5, -1]], "id -1: give 0 to 127"),
        ([[5.0]], "holds no token ids"),
        ([5, 6], "is of int and holds no token ids"),
        ([[{"role": "user", "content": "hi"}]], r"chat_ids\(target, messages\)"),
        ([{"input_ids": [5, 6]}], "is of dict and holds no token ids"),
    ],
)
def test_what_is_no_list_of_prompts(prompts: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        generate(tiny_target(), NoDrafter(), prompts, max_new_tokens=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [0, -1, 1.5])
def test_rows_are_one_or_more(rows: object) -> None:
    with pytest.raises(UserError, match=r"rows is .*: give a whole number of 1 or more"):
        generate(tiny_target(), NoDrafter(), [[5]], max_new_tokens=2, rows=rows)  # type: ignore[arg-type]

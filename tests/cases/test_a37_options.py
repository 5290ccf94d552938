"""A37: every option of every drafter outlives its folder, and an unknown one is refused."""

import dataclasses
import json
import typing
from pathlib import Path

import pytest
import torch

from drafters.base import NeuralDrafter
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.reduced import ReducedDrafter
from drafters.registry import method, methods
from drafters.target import Target
from tests.neural import batch_of
from tests.tiny import prompts_of, tiny_target

NEURAL = sorted(name for name, kind in methods().items() if issubclass(kind, ReducedDrafter))
BASE: dict[str, dict[str, object]] = {
    "mtp": {"unroll": 4},
    "eagle": {"taps": [0, 1]},
    "peagle": {"taps": [0, 1]},
    "dflash": {"taps": [0, 1]},
    "dflash2": {"taps": [0, 1], "selector_rank": 8},
    "dspark": {"taps": [0, 1]},
    "standalone": {"num_layers": 2},
}
# where what a number, a text or none turns into is not obvious from its type
OTHER: dict[str, object] = {
    "taps": [0, 2],
    "draft_vocab_size": 40,
    "unroll": 3,
    "channels": 8,
    "num_layers": 1,
}
OTHER_OF: dict[str, dict[str, object]] = {"standalone": {"layers": [0, 2]}}
# another model's sizes: tests/unit/test_standalone.py
ELSEWHERE = {"model", "model_shape"}


def others(name: str) -> list[tuple[str, object]]:
    """Every option of a family with a value that is not its default."""
    schema = method(name).schema  # type: ignore[attr-defined]
    hints, found = typing.get_type_hints(schema), []
    for field in dataclasses.fields(schema):
        default = field.default
        own = {**OTHER, **OTHER_OF.get(name, {})}
        if field.name in own:
            found.append((field.name, own[field.name]))
        elif isinstance(default, bool):
            found.append((field.name, not default))
        elif isinstance(default, int):
            found.append((field.name, default + 1))
        elif isinstance(default, float):
            found.append((field.name, default / 2 + 0.125))
        else:
            choices = [x for x in typing.get_args(hints[field.name]) if isinstance(x, str)]
            found += [(field.name, x) for x in choices if x not in (default, "shipped")]
    return found


def build(name: str, target: Target, options: dict[str, object]) -> NeuralDrafter:
    torch.manual_seed(0)
    drafter = method(name).build(options, target.shape)
    assert isinstance(drafter, NeuralDrafter)
    for parameter in drafter.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return drafter.eval()


def logits(drafter: NeuralDrafter, target: Target) -> list[torch.Tensor]:
    batch = batch_of(target, drafter, torch.tensor(prompts_of(8)))
    with torch.no_grad():
        return [p.logits(slice(None)) for p in drafter.predict(batch, target)]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "medusa")) for n in NEURAL]
)
def test_a37_each_option_is_stored_and_read(name: str, tmp_path: Path) -> None:
    target = tiny_target(num_hidden_layers=3, hidden_size=32, intermediate_size=64)
    tried = others(name)
    fields = {field.name for field in dataclasses.fields(method(name).schema)}  # type: ignore[attr-defined]
    assert {key for key, _ in tried} == fields - ELSEWHERE
    for key, value in tried:
        drafter = build(name, target, {**BASE.get(name, {}), key: value})
        folder = save_drafter(drafter, tmp_path / f"{key}-{value}", target)
        loaded = load_drafter(folder, target)
        assert isinstance(loaded, NeuralDrafter)
        assert loaded.options() == drafter.options(), key
        stored = loaded.options()[key]
        assert list(stored) == value if isinstance(value, list) else stored == value
        for ours, theirs in zip(logits(drafter, target), logits(loaded, target), strict=True):
            assert torch.equal(ours, theirs), key


@pytest.mark.parametrize("place", ["options", "shape", None])
def test_a37_an_unknown_field_is_refused(place: str | None, tmp_path: Path) -> None:
    target = tiny_target(num_hidden_layers=2)
    folder = save_drafter(build("medusa", target, {}), tmp_path / "d", target)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    (config if place is None else config[place])["output_norm"] = True
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match="output_norm"):
        load_drafter(folder, target)

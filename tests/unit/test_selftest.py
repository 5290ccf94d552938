"""The self-test at load: a target that would be served wrongly is refused, and it says why."""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from drafters import engines, reference
from drafters.errors import UserError
from drafters.lean import LeanModel
from drafters.placement import Placement
from drafters.selftest import SelfTest
from drafters.shape import TargetShape
from drafters.target import Target
from tests.tiny import tiny_model, tiny_target

A_TREE = "a tree's states and those of each path alone differ"


def without(model: nn.Module, *arguments: str) -> nn.Module:
    """Make the base model deaf to arguments of its forward."""
    forward = model.base_model.forward

    @wraps(forward)
    def deaf(*args: object, **kwargs: object) -> object:
        return forward(*args, **{k: v for k, v in kwargs.items() if k not in arguments})

    model.base_model.forward = deaf
    return model


@pytest.mark.parametrize("argument", ["attention_mask", "position_ids"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_that_ignores_mask_or_positions(argument: str, attention: str) -> None:
    model = without(tiny_model(attention=attention), argument)
    with pytest.raises(UserError, match=f"target deaf would be served wrongly: {A_TREE}"):
        Target(model, name="deaf", engine="reference")


def test_a_mask_ignored_by_our_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lean forward fails, and the model's own with it: it reads the same masks."""
    monkeypatch.setattr(Placement, "mask", lambda *_: None)
    with (
        pytest.warns(
            UserWarning, match=r"lean forward fails the self-test \(the states over a plain"
        ),
        pytest.raises(UserError, match="the states over a plain prompt differ"),
    ):
        tiny_target()


def test_a_tap_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_input(tapped: dict[int, torch.Tensor], index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[torch.Tensor], _output: object) -> None:
            tapped[index] = inputs[0]

        return hook

    monkeypatch.setattr(reference, "_keep_output", keep_input)
    with pytest.raises(UserError, match=r"the output of layer 0 and hidden_states\[1\] differ"):
        tiny_target(engine="reference")


def test_a_model_that_turns_its_logits() -> None:
    model = tiny_model()
    forward = model.forward

    @wraps(forward)
    def doubled(*args: object, **kwargs: object) -> object:
        out = forward(*args, **kwargs)
        out.logits = 2 * out.logits
        return out

    model.forward = doubled
    with pytest.raises(UserError, match=r"the logits after a prompt differ by 0\.5 of their size"):
        Target(model, engine="reference")


def test_nan_is_a_difference() -> None:
    model = tiny_model()
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(UserError, match="differ by nan"):
        Target(model, engine="reference")


class ShiftedTaps(LeanModel):
    """Gives the next layer's output for every tap."""

    def __call__(self, tokens, positions, attend, taps):
        return super().__call__(tokens, positions, attend, tuple(layer + 1 for layer in taps))


class NoWindow(LeanModel):
    """Forgets the sliding windows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.layers = [replace(layer, window=None) for layer in self.layers]


@pytest.mark.parametrize(
    ("lean", "difference"),
    [(ShiftedTaps, r"the output of layer 0 and hidden_states\[1\]"), (NoWindow, "a tree's states")],
)
def test_a_wrong_lean_forward_is_left_aside(
    lean: type[LeanModel], difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "LeanModel", lean)
    with pytest.warns(UserWarning, match=rf"lean forward fails the self-test \({difference}"):
        assert tiny_target("mistral", sliding_window=8).engine == "reference"


@pytest.mark.slow
@pytest.mark.parametrize("window", [40, 1024])
def test_a_forgotten_window_longer_than_the_short_rows(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context longer than the window is tried, where the model's context holds one."""
    sizes = {"sliding_window": window, "num_hidden_layers": 2, "max_position_embeddings": 1500}
    assert tiny_target("mistral", **sizes).engine == "fast"
    monkeypatch.setattr(engines, "LeanModel", NoWindow)
    said = rf"the states beyond a window of {window} tokens differ"
    with pytest.warns(UserWarning, match=said):
        assert tiny_target("mistral", **sizes).engine == "reference"
    with pytest.raises(UserError, match=rf"cannot run on the fast engine: .*{said}"):
        tiny_target("mistral", engine="fast", **sizes)


def selftest_of(model: Any, windows: Sequence[int | None] = ()) -> SelfTest:
    return SelfTest(model, TargetShape.of(model.config, 128), windows, torch.device("cpu"))


@pytest.mark.parametrize(
    ("window", "context", "tried"),
    [(1024, 4096, 1024), (1025, 4096, None), (40, 52, None), (40, 53, 40), (None, 256, None)],
)
def test_which_windows_are_tried(window: int | None, context: int, tried: int | None) -> None:
    model = tiny_model("mistral", max_position_embeddings=context, num_hidden_layers=1)
    assert selftest_of(model, [window, None]).window == tried


def test_a_lean_target_costs_one_forward_of_the_model() -> None:
    model = tiny_model()
    sizes = []
    model.register_forward_hook(lambda _module, _inputs, out: sizes.append(out.logits.shape))
    assert Target(model).engine == "fast"
    assert sizes == [(3, 10, 128)]  # three paths of at most 6 + 4 tokens


def test_low_precision_is_judged_by_its_own_measure() -> None:
    assert Target(tiny_model().bfloat16()).engine == "fast"
    model = without(tiny_model().bfloat16(), "attention_mask")
    with pytest.raises(UserError, match=A_TREE):
        Target(model, engine="reference")
    assert selftest_of(tiny_model().bfloat16()).tolerance > selftest_of(tiny_model()).tolerance


RUNNING = "keep a running state, which cannot be taken back when a draft is refused; give a model"


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("mamba", {}, f"target of type mamba: its layers {RUNNING}"),
        (
            "qwen3_next",
            {"layer_types": ["linear_attention", "full_attention"] * 2},
            rf"target of type qwen3_next: its layers \(linear_attention\) {RUNNING}",
        ),
        (
            "llama4_text",
            {"layer_types": ["chunked_attention", "full_attention"] * 2, "head_dim": 16},
            r"its layers \(chunked_attention\) choose what they read of the past by themselves",
        ),
    ],
)
def test_layers_that_cannot_be_rolled_back(
    family: str, changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    """Refused from the config alone, before any weight is read, and a model in memory too."""
    config = AutoConfig.for_model(
        family, vocab_size=32, hidden_size=32, num_hidden_layers=4, eos_token_id=None, **changes
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(UserError, match=reason):
        Target.load(tmp_path)
    if family == "mamba":
        with pytest.raises(UserError, match=reason):
            Target(AutoModelForCausalLM.from_config(config).eval())


def test_a_model_whose_cache_has_another_form() -> None:
    """One key head that the config does not name; no position_ids."""
    with pytest.raises(UserError, match="target tiny-falcon does not run over the engine's cache"):
        _quietly("falcon")
    with pytest.raises(UserError, match="target tiny-bloom does not run over the engine's cache"):
        _quietly("bloom", attention="eager", n_layer=4, n_head=4)


def test_a_config_without_a_length_of_contexts() -> None:
    config = AutoConfig.for_model("bloom", hidden_size=32, n_layer=2, n_head=2, vocab_size=128)
    with pytest.raises(UserError, match="of type bloom: its config names no max_position_embed"):
        Target(AutoModelForCausalLM.from_config(config))


def test_a_model_that_does_not_run_by_itself() -> None:
    model = tiny_model()
    model.model.layers[0].self_attn.head_dim = 7
    with pytest.raises(UserError, match=r"type llama does not run .* \(RuntimeError: .* fit tog"):
        Target(model)


def _quietly(family: str, **changes: object) -> Target:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no lean forward")
        return tiny_target(family, **changes)


def test_longrope_is_served_within_its_original_context() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 32,
    }
    found = _quietly("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    assert found.config.max_position_embeddings == 256
    assert found.shape.max_positions == 32


@pytest.mark.parametrize(("family", "width"), [("llama", 128), ("gpt2", 128), ("opt", 128)])
def test_the_width_of_the_mlp_by_any_name(family: str, width: int) -> None:
    assert TargetShape.of(tiny_model(family).config, 128).intermediate_size == width

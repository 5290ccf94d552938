"""Every tensor is where it must be: checked without a GPU.

Forwards on tensors without data; training and decoding on pretended devices (tests/pretended.py).
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoConfig, AutoModelForCausalLM

from drafters.base import Features, NeuralDrafter
from drafters.cache import KVCache
from drafters.lean import LeanModel
from drafters.losses import LossSettings
from drafters.placement import Placement
from drafters.reference import ReferenceModel
from drafters.spread import layers_on_disk
from drafters.static import StaticModel
from drafters.target import Target
from inference import generate
from tests.pretended import Pretended
from tests.tiny import prompts_of, tiny_model, tiny_target
from tests.unit.test_every_drafter import NEURAL, make
from tests.unit.test_objective import examples_of, lessons_of
from training.objective import Objective

DEVICE = "meta"
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": 6,
}


def placement_of(rows: int, width: int, span: int, grid: torch.Tensor | None) -> Placement:
    count = rows * width if grid is None else len(grid)
    place = torch.arange(count, device=DEVICE)
    return Placement(
        rows=slice(0, rows),
        cells=place,
        positions=place,
        grid=grid,
        width=width,
        span=span,
        hidden=torch.zeros(rows, width, span, dtype=torch.bool, device=DEVICE),
        query_position=torch.zeros(rows, width, dtype=torch.int64, device=DEVICE),
        counts=[width] * rows,
        guessed=(place[: rows * 2].view(rows, 2), place[: rows * 2].view(rows, 2)),
    )


@pytest.mark.parametrize("kind", [LeanModel, StaticModel, ReferenceModel])
def test_a_forward_mixes_no_devices(kind: Any) -> None:
    config = AutoConfig.for_model("mistral", **SIZES)
    with torch.device(DEVICE):
        base = AutoModelForCausalLM.from_config(config).eval().base_model
    with torch.inference_mode():
        served = kind(base, [6, 6]) if kind is ReferenceModel else kind(base)
        cache = KVCache(2, 20, layers=2, heads=2, head_dim=8, device=DEVICE)
        for grid in (None, torch.arange(5, device=DEVICE)):
            placed = placement_of(2, 3, 12, grid)
            tokens = torch.zeros_like(placed.positions)
            last, taps = served.placed(tokens, placed, cache, (0,))
            assert (last.device.type, last.shape) == (DEVICE, (len(tokens), 32))
            assert taps is not None
            assert taps.device.type == DEVICE


def test_a_tensor_left_behind_is_noticed() -> None:
    """What the test above rests on."""
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(3, device=DEVICE) + torch.zeros(3)


HERE = "cuda:2"
FAST = {"eagle", "medusa"}
FAMILIES = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in NEURAL]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    monkeypatch.setattr("drafters.cache._free_memory", lambda _: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda _: None)
    with Pretended() as devices:
        yield devices


def spread_target(family: str = "llama", **changes: Any) -> Target:
    """Return a target with its first layers on cuda:0, last layers and head on cuda:1."""
    model = tiny_model(family, **changes)
    places = layers_on_disk(model.config, "cuda:0")
    layers = [name for name, place in places.items() if place == "disk"]
    late = layers[len(layers) // 2 :]
    for name in places:
        last = name in late or "norm" in name or name.endswith(("ln_f", "lm_head"))
        places[name] = "cuda:1" if last else "cuda:0"
    return Target(dispatch_model(model, places), engine="reference", device=torch.device(HERE))


def learned(target: Target, name: str) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Return a lesson's sums and gradients of a drafter beside a target, and what it decodes."""
    drafter = make(name, target)
    assert isinstance(drafter, NeuralDrafter)
    drafter.to(target.device)
    lessons = lessons_of(examples_of(20, 14), target, drafter.features)
    sums = Objective(drafter, target, LossSettings())(lessons[0])
    sums.loss.sum().backward()
    found = [*sums, *(p.grad for p in drafter.parameters() if p.grad is not None)]
    assert {x.device for x in found} == {target.device}
    outputs = generate(target, drafter.eval(), prompts_of(7, 5), max_new_tokens=8)
    return found, [output.ids for output in outputs]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_drafter_has_a_device_of_its_own(name: str, pretended: Pretended) -> None:
    """It learns and drafts what it does beside a target that lies whole on the CPU."""
    target = spread_target()
    assert {str(p.device) for p in target.model.parameters()} == {"cuda:0", "cuda:1"}
    assert str(target.device) == HERE
    found, ids = learned(target, name)
    wanted, texts = learned(tiny_target(engine="reference"), name)
    assert ids == texts
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left.cpu(), right, rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_drafter_and_a_lean_target_share_a_device(name: str, pretended: Pretended) -> None:
    target = Target(tiny_model().to(HERE))
    assert (target.engine, str(target.device)) == ("fast", HERE)
    _, ids = learned(target, name)
    _, texts = learned(tiny_target(), name)
    assert ids == texts


@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma3_text"])
def test_answers_lie_together(family: str, pretended: Pretended) -> None:
    """Wherever the layers lie: states, logits, rows, and weights that drafters begin with."""
    window = {"sliding_window": 6} if family == "mistral" else {}
    target = spread_target(family, **window)
    ids = torch.arange(3, 15, device=HERE).view(1, -1)
    taps, last = target.forward_batch(
        ids, torch.zeros_like(ids), torch.arange(12, device=HERE)[None], Features((0, 2), last=True)
    )
    assert taps is not None
    rows = target.head_rows(ids[0])
    answers = [taps, last, target.embed(ids), target.head(last), target.head(last, ids[0]), rows]
    answers += [*target.norm_state().values(), *target.layer_state(3).values()]
    assert {str(x.device) for x in answers} == {HERE}


def test_what_is_pretended_is_noticed(pretended: Pretended) -> None:
    """What the tests above rest on."""
    here, there = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    assert (here + torch.tensor(1.0)).device == here.device
    assert torch.nn.Parameter(here)[1:].t().device == here.device
    assert (here + there.to(here)).tolist() == [2, 2, 2]
    mixed = [lambda: here + there, lambda: here[there.long()], lambda: torch.cat((here, there))]
    for operation in mixed:
        with pytest.raises(RuntimeError, match=r"another device|cuda:0 and cuda:1"):
            operation()
    with pytest.raises(TypeError, match="no numpy"):
        here.numpy()

"""States from an engine: the same lessons, asked for and checked; what is wrong is one line."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from drafters.base import Features
from drafters.errors import UserError
from drafters.losses import LossSettings
from drafters.target import Target
from inference.served.states import StateServer
from inference.served.vllm_states import watch, write
from tests.tiny import tiny_target
from tests.unit.test_feature_store import forbid, store_of
from tests.unit.test_objective import drafter_of, examples_of
from tests.unit.test_served import engine_that
from training.batches import compose
from training.examples import Example, pack
from training.features import Lessons
from training.lesson_settings import FeatureSettings
from training.objective import Objective
from training.served_states import ServedStates, check

CHATS = [*examples_of(20, 14, 17, 30, 25, 11), *examples_of(9, answer=0)]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=7, initializer_range=0.2)


class Stand:
    """An engine in this process: a target that goes through texts one by one.

    Args:
        target: as the engine holds it.
        shift: added to the layers it is asked for.
        normed: whether its last states are what the head reads.
    """

    version = "stand 1.0"

    def __init__(self, target: Target, shift: int = 0, *, normed: bool = True) -> None:
        self.target, self.shift, self.normed = target, shift, normed
        self.asked: list[int] = []

    def states(
        self, texts: Sequence[Sequence[int]], layers: Sequence[int]
    ) -> list[tuple[Tensor | None, Tensor]]:
        self.asked += map(len, texts)
        shifted = tuple(layer + self.shift for layer in layers)
        return [self._one(torch.tensor([text]), shifted) for text in texts]

    def _one(self, ids: Tensor, layers: tuple[int, ...]) -> tuple[Tensor | None, Tensor]:
        place = torch.zeros_like(ids), torch.arange(ids.shape[1])[None]
        features = Features((*layers, self.target.shape.num_layers - 1), last=True)
        taps, last = Target.forward_batch(self.target, ids, *place, features)
        assert taps is not None
        *taken, raw = taps[0].chunk(len(features.layers), -1)
        return torch.cat(taken, -1) if taken else None, last[0] if self.normed else raw


def lessons_of(
    target: Target, features: Features, examples: Sequence[Example], **more: Any
) -> Lessons:
    return Lessons(
        examples,
        compose([len(e) for e in examples], 64, seed=0),
        target=target,
        features=features,
        settings=FeatureSettings("none", "float32"),
        loss=LossSettings(),
        **more,
    )


def served_by(engine: Stand, target: Target, layers: tuple[int, ...]) -> ServedStates:
    return ServedStates(lambda: engine, target, layers, torch.float32, 256)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("eagle", {"taps": [1, 3, 5]}), ("medusa", {})])
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_losses_are_those_of_our_own_states(
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
    packed: bool,
) -> None:
    drafter = drafter_of(target, name, **options)
    objective, layers = Objective(drafter, target, LossSettings()), drafter.features.layers
    examples = pack(CHATS, 60) if packed else CHATS
    ours = lessons_of(target, drafter.features, examples)
    wanted = [objective(ours[index]) for index in range(len(ours))]
    engine = Stand(target)
    served = served_by(engine, target, layers)
    check(engine, target, layers)
    served._engine = engine
    forbid(target, monkeypatch)
    online = lessons_of(target, drafter.features, examples, served=served)
    store = store_of(tmp_path, target, layers, "float32")
    filling = lessons_of(target, drafter.features, examples, served=served, store=store)
    for index in range(len(filling)):
        filling.make(index)
    filling.flush()
    store = store_of(tmp_path, target, layers, "float32")
    read = lessons_of(target, drafter.features, examples, store=store)
    for index, sums in enumerate(wanted):
        for lessons in (online, filling, read):
            for left, right in zip(sums, objective(lessons[index]), strict=True):
                torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    assert max(engine.asked) == 29  # of 30 tokens the last is only a label


def test_an_engine_is_started_and_checked_once_and_only_if_needed(target: Target) -> None:
    started: list[Stand] = []

    def start() -> Stand:
        started.append(Stand(target))
        return started[-1]

    served = ServedStates(start, target, (1, 3), torch.bfloat16, 256)
    lessons = lessons_of(target, Features((1, 3)), CHATS, served=served)
    assert not started
    lessons.make(0)
    lessons.make(1)
    (engine,) = started
    assert engine.asked.count(24) == 1  # the checked text


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"shift": 1}, "the output of layer 1 of tiny-llama what is the output of layer 2 here"),
        ({"shift": -1}, "the output of layer 1 of tiny-llama what is the output of layer 0 here"),
        ({"normed": False}, "the last state of tiny-llama what is the output of layer 6 here"),
    ],
)
def test_states_of_another_place_are_named(
    target: Target, engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"stand 1.0 gives for {message}"):
        check(Stand(target, **engine), target, (1, 3))


def test_states_of_other_weights_are_refused(target: Target) -> None:
    other = tiny_target(num_hidden_layers=7, initializer_range=0.2, seed=1)
    with pytest.raises(UserError, match=r"differs by .* give it the same weights"):
        check(Stand(other), target, (1, 3))


class Model(nn.Module):
    """Looks like a model of vLLM's: a flat batch goes in, what it shall give comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: tuple[int, ...] = ()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.layers = layers

    def forward(self, input_ids: Tensor, positions: Tensor) -> Any:
        states = torch.stack((input_ids, positions), -1).float()
        return (states, [states + layer for layer in self.layers]) if self.layers else states


def test_the_engine_s_side_tells_prompts_apart(tmp_path: Path) -> None:
    model = Model()
    worker = SimpleNamespace(get_model=lambda: model, rank=0)
    prompts, file = [[5, 6, 7], [8], [5, 6, 9]], str(tmp_path / "states")
    flat = [8, 5, 6, 9, 5, 6, 7], [0, 0, 1, 2, 0, 1, 2]

    def run(layers: list[int]) -> dict[str, Tensor]:
        watch(worker, layers)
        out = model(input_ids=torch.tensor(flat[0]), positions=torch.tensor(flat[1]))
        assert isinstance(out, Tensor)  # the engine goes on as without a drafter
        write(worker, prompts, file)
        return load_file(file)

    found = run([1, 3])
    assert found["last"][:, 0].tolist() == [5, 6, 7, 8, 5, 6, 9]
    assert found["taps"][:, :, 0].tolist() == [[x + 2, x + 4] for x in found["last"][:, 0]]
    assert run([])["taps"].shape == (7, 0, 2)
    assert not model.states_seen
    other = Model()
    beside = SimpleNamespace(get_model=lambda: other, rank=1)
    watch(beside, [1])
    assert isinstance(other(input_ids=torch.tensor([1]), positions=torch.tensor([0])), Tensor)
    write(beside, prompts, str(tmp_path / "never"))
    assert other.states_seen is None
    assert not (tmp_path / "never").exists()
    with pytest.raises(ValueError, match="3 of 3 prompts went through it in pieces"):
        write(worker, prompts, file)
    with pytest.raises(ValueError, match="its Linear gives no outputs of layers"):
        watch(SimpleNamespace(get_model=lambda: nn.Linear(1, 1)), [1])


ANSWERS = """
import os, struct
settings = json.loads(sys.stdin.readline())
assert settings["model"] == "t" and settings["tensor_parallel_size"] == 2, settings
print(json.dumps({"version": "v"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    ids = [id for prompt in asked["prompts"] for id in prompt]
    if 13 in ids:
        raise ValueError("no thirteen")
    taps = [id + layer for id in ids for layer in asked["layers"]]
    data = struct.pack(f"<{len(ids) + len(taps)}f", *ids, *taps)
    end = 4 * len(ids)
    head = {
        "last": {"dtype": "F32", "shape": [len(ids), 1], "data_offsets": [0, end]},
        "taps": {
            "dtype": "F32",
            "shape": [len(ids), len(asked["layers"]), 1],
            "data_offsets": [end, len(data)],
        },
    }
    head = json.dumps(head).encode()
    open(asked["file"], "wb").write(struct.pack("<Q", len(head)) + head + data)
    print(json.dumps({"file": asked["file"]}), flush=True)
"""


def server_of(root: Path, **options: Any) -> StateServer:
    return StateServer(root, Path("t"), "float32", longest=8, tokens=16, threads=1, options=options)


def test_requests_go_out_and_states_come_back(tmp_path: Path) -> None:
    server = server_of(engine_that(tmp_path, ANSWERS), tensor_parallel_size=2)
    assert server.version == "v"
    (taps, last), (_, other) = server.states([[1, 2], [3]], [10, 20])
    assert (last.tolist(), other.tolist()) == ([[1], [2]], [[3]])
    assert taps is not None
    assert taps.tolist() == [[11, 21], [12, 22]]
    assert server.states([[1, 2]], [])[0][0] is None
    with pytest.raises(UserError, match="vLLM gives no states: ValueError: no thirteen"):
        server.states([[13]], [])
    server.close()


def test_an_engine_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vLLM is not in .*: run `make engines`"):
        server_of(tmp_path)
    root = engine_that(tmp_path, "raise ImportError('no vllm here')\n")
    with pytest.raises(UserError, match="vLLM gives no states: ImportError: no vllm here"):
        server_of(root)

"""vLLM's states are ours: layer by layer, and in the loss of a batch."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drafters.base import Features
from drafters.loading import load_config
from drafters.losses import LossSettings
from drafters.spread import layers_on_disk
from drafters.target import Target
from inference.served.states import StateServer
from tests.engines.servers import ROOT, folder_for_vllm
from tests.folders import VOCAB_SIZE
from tests.tiny import prompts_of
from tests.unit.test_objective import drafter_of, examples_of
from training.batches import compose
from training.features import Lessons
from training.lesson_settings import FeatureSettings
from training.objective import Objective
from training.served_states import ServedStates, check

LAYERS = (1, 3, 5)
LONGEST = 60
# largest difference, relative to a state's size: float32, bfloat16
WITHIN = {"float32": 1e-5, "bfloat16": 0.1}
LOSS_WITHIN = {"float32": 1e-4, "bfloat16": 0.02}

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        not (ROOT / "vllm/bin/python").exists(), reason="no engines here: run `make engines`"
    ),
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_for_vllm(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def server(folder: Path, dtype: str) -> Iterator[StateServer]:
    sizes = {"longest": LONGEST, "tokens": 4 * LONGEST, "threads": 1}
    server = StateServer(ROOT, folder, dtype, **sizes, options={})
    yield server
    server.close()


def test_states_are_ours(folder: Path, server: StateServer, dtype: str) -> None:
    places = layers_on_disk(load_config(folder, "target"), "cpu")
    target = Target.load(folder, dtype=dtype, device_map=places)
    check(server, target, LAYERS)
    check(server, target, ())
    texts = prompts_of(1, 7, LONGEST, 33, vocab_size=VOCAB_SIZE)
    worst: dict[str, float] = {}
    for text, (taps, last) in zip(texts, server.states(texts, LAYERS), strict=True):
        ids = torch.tensor([text])
        place = torch.zeros_like(ids), torch.arange(len(text))[None]
        ours, our_last = target.forward_batch(ids, *place, Features(LAYERS, last=True))
        assert ours is not None
        assert taps is not None
        pairs = zip(("last", *map(str, LAYERS)), (last, *taps.chunk(3, -1)), strict=True)
        for (name, theirs), truth in zip(pairs, (our_last[0], *ours[0].chunk(3, -1)), strict=True):
            assert theirs.dtype == truth.dtype
            difference = (theirs.float() - truth.float()).norm(dim=-1) / truth.float().norm(dim=-1)
            worst[name] = max(worst.get(name, 0.0), float(difference.max()))
    sys.stdout.write(f"\n{dtype}: largest difference of a state {worst}\n")
    assert max(worst.values()) < WITHIN[dtype]


def test_the_loss_of_a_batch_is_ours(folder: Path, server: StateServer, dtype: str) -> None:
    target = Target.load(folder, dtype=dtype)
    drafter = drafter_of(target, "eagle", taps=list(LAYERS))
    objective = Objective(drafter, target, LossSettings())
    examples = examples_of(20, 44, LONGEST, 31)
    stored = "float32" if dtype == "float32" else "bfloat16"
    served = ServedStates(lambda: server, target, LAYERS, getattr(torch, stored), 256)
    losses = []
    for by in (None, served):
        lessons = Lessons(
            examples,
            compose([len(e) for e in examples], 4 * LONGEST, seed=0),
            target=target,
            features=drafter.features,
            settings=FeatureSettings("none", stored),
            loss=LossSettings(),
            served=by,
        )
        assert len(lessons) == 1
        sums = objective(lessons[0])
        losses.append(float(sums.loss.detach().sum() / sums.weight.sum()))
    sys.stdout.write(f"\n{dtype}: loss of a batch {losses[0]:.6f} here, {losses[1]:.6f} by vLLM\n")
    assert losses[1] == pytest.approx(losses[0], rel=LOSS_WITHIN[dtype])

"""A drafter in shares (FSDP 2) learns what a whole one learns, and goes on after a stop."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.tensor import DTensor

from drafters.errors import UserError
from drafters.target import Target
from tests.tiny import tiny_target
from tests.unit.test_trainer import settings_of, stop_after, trainer_of
from training import replicas
from training.lesson_settings import OnPolicySettings
from training.options import EvaluateSettings
from training.state import STATE
from training.trainer import Trainer


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=7, initializer_range=0.2)


@pytest.fixture
def shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a group of this process alone; two are in tests/smoke/test_training.py."""
    monkeypatch.setattr(replicas, "in_shares", lambda _: True)
    place = f"file://{tmp_path / 'group'}"
    distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def files(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors that a run leaves."""
    found: dict[str, torch.Tensor] = {}
    for file in (STATE, "best/model.safetensors", "last/model.safetensors"):
        found |= {f"{file} {key}": value for key, value in load_file(folder / file).items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["medusa", "dspark"])
def test_shares_learn_what_the_whole_learns(
    tmp_path: Path, target: Target, shares: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def measure(_: object) -> dict[str, float]:
        return {"tau": 2.0}

    def trained(folder: str, steps: int = 8, **more: object) -> Trainer:
        settings = settings_of(tmp_path / folder, evaluate=EvaluateSettings(times=2), **more)
        trainer = trainer_of(target, settings, name=name, measure=measure)
        if steps < 8:
            stop_after(trainer, steps)
        assert trainer.train() == (None if steps == 8 else signal.SIGTERM)
        return trainer

    cut = trained("cut", 5)
    assert all(isinstance(p, DTensor) for p in cut.drafter.parameters())
    trained("cut", resume=True)
    monkeypatch.setattr(replicas, "in_shares", lambda _: False)
    whole = trained("whole")
    assert not any(isinstance(p, DTensor) for p in whole.drafter.parameters())
    ours, theirs = (files(tmp_path / folder) for folder in ("whole", "cut"))
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


def test_what_needs_a_whole_drafter_everywhere_is_refused(
    tmp_path: Path, target: Target, shares: None
) -> None:
    settings = replace(settings_of(tmp_path), on_policy=OnPolicySettings(share=0.5))
    with pytest.raises(UserError, match=r"on_policy\.share is 0\.5, .* launch without FSDP"):
        trainer_of(target, settings, name="standalone")

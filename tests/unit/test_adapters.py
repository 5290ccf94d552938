"""Adapters: they alone are trained, and what is published has them merged."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafters.base import NeuralDrafter
from drafters.checkpoint import load_drafter
from drafters.target import Target
from inference import generate
from tests.tiny import prompts_of, tiny_target
from tests.unit.test_objective import drafter_of
from tests.unit.test_trainer import settings_of, stop_after, trainer_of, weights
from training.adapters import add_adapters, merged
from training.lesson_settings import OnPolicySettings
from training.options import EvaluateSettings, OptimSettings
from training.trainer import Trainer

pytestmark = pytest.mark.slow

LORA = OptimSettings(lr=1e-2, lora_rank=4)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=7, initializer_range=0.2)


def logits(drafter: NeuralDrafter, trainer: Trainer) -> torch.Tensor:
    with torch.no_grad():
        (guess,) = drafter.predict(trainer.run.lessons[0].batch, trainer.target)
        return guess.logits(slice(None))


def test_a_fresh_adapter_changes_nothing_and_all_else_is_frozen(target: Target) -> None:
    plain, adapted = (drafter_of(target, "standalone", num_layers=2) for _ in range(2))
    add_adapters(adapted, LORA)
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert len(trained) == 2 * sum(isinstance(m, torch.nn.Linear) for m in plain.modules())
    assert merged(plain) is plain
    copy = weights(merged(adapted))
    assert copy.keys() == weights(plain).keys()
    for name, value in weights(plain).items():
        assert torch.equal(copy[name], value)


def test_the_published_folder_computes_what_the_adapted_drafter_does(
    tmp_path: Path, target: Target
) -> None:
    measured: list[dict[str, torch.Tensor]] = []

    def measure(drafter: NeuralDrafter) -> dict[str, float]:
        measured.append(weights(drafter))
        return {"tau": 2.0}

    settings = settings_of(
        tmp_path,
        optim=LORA,
        publish_dtype="float32",
        evaluate=EvaluateSettings(times=2),
        on_policy=OnPolicySettings(share=0.3, tokens=5),
    )
    trainer = trainer_of(target, settings, name="standalone", measure=measure)
    before = logits(trainer.drafter, trainer)
    trainer.train()
    after = logits(trainer.drafter, trainer)
    assert (after - before).abs().max() > 0.1
    for name in ("best", "last"):
        loaded = load_drafter(tmp_path / name, target)
        assert isinstance(loaded, NeuralDrafter)
        assert not any("lora" in key for key in weights(loaded))
        torch.testing.assert_close(logits(loaded, trainer), after, atol=1e-4, rtol=1e-4)
        for key, value in weights(loaded).items():
            assert torch.equal(value, measured[-1][key])
    assert generate(target, loaded, prompts_of(5), max_new_tokens=6)[0].rounds
    assert trainer.run.objective.drafter is trainer.drafter


def test_a_stopped_run_with_adapters_goes_on_as_if_it_had_not(
    tmp_path: Path, target: Target
) -> None:
    straight = trainer_of(target, settings_of(tmp_path / "a", optim=LORA), name="standalone")
    straight.train()
    broken = trainer_of(target, settings_of(tmp_path / "b", optim=LORA), name="standalone")
    stop_after(broken, 3)
    broken.train()
    settings = replace(settings_of(tmp_path / "b", optim=LORA), resume=True)
    resumed = trainer_of(target, settings, name="standalone")
    resumed.train()
    for key, value in weights(straight.drafter).items():
        assert torch.equal(value, weights(resumed.drafter)[key]), key

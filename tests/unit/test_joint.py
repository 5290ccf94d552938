"""Medusa-2: a drafter and its target's adapter learn together; what decides is both together."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from drafters.adapter import ADAPTER
from drafters.base import NeuralDrafter
from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.fingerprint import Fingerprint
from drafters.growth import Chain
from drafters.losses import LossSettings
from drafters.methods.none import NoDrafter
from drafters.target import Target
from inference import generate
from tests.folders import save_tiny_target
from tests.neural import batch_of
from tests.tiny import prompts_of, tiny_target
from tests.unit.test_objective import drafter_of, examples_of, lessons_of
from tests.unit.test_trainer import settings_of, stop_after, trainer_of, weights
from training.joint import Joint, served_by, served_from
from training.metrics import held_out_metrics, line
from training.objective import Objective
from training.options import EvaluateSettings, OptimSettings, TrainSettings
from training.target_settings import AdapterSettings

SETTINGS = AdapterSettings(rank=4, alpha=8, dropout=0.1)
OPTIONS: dict[str, dict[str, object]] = {"medusa": {}, "eagle": {"taps": [0, 1, 2]}, "mtp": {}}
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(**SIZES)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("joint") / "base", **SIZES)


def joint_of(target: Target, name: str = "medusa", distance: float = 0.0) -> Joint:
    """Make a joint drafter whose adapter lies some way from changing nothing."""
    joint = Joint(drafter_of(target, name, **OPTIONS[name]), target, SETTINGS).eval()
    with torch.no_grad():
        for parameter in joint.adapter.parameters():
            parameter.add_(distance * torch.randn_like(parameter))
    return joint


def logits_of(drafter: NeuralDrafter, batch: Any, target: Target) -> list[Tensor]:
    with torch.no_grad():
        return [p.logits(slice(0, len(p.positions))) for p in drafter.predict(batch, target)]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_fresh_adapter_changes_nothing(target: Target, name: str) -> None:
    joint = joint_of(target, name)
    batch = batch_of(target, joint.drafter, torch.tensor(prompts_of(11, 11)))
    own, *drafted = logits_of(joint, batch, target)
    plain = logits_of(joint.drafter, batch, target)
    torch.testing.assert_close(drafted, plain, atol=1e-4, rtol=1e-4)
    frozen = target.head(batch.last[:, :-1].flatten(0, 1))
    torch.testing.assert_close(own, frozen, atol=1e-4, rtol=1e-4)
    for name, value in joint.served_by(target).model.state_dict().items():
        assert torch.equal(value, target.model.state_dict()[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_training_reads_the_states_that_the_served_target_has(target: Target, name: str) -> None:
    """The adapted layers of training and the merged, packed ones of decoding are one target."""
    joint = joint_of(target, name, distance=0.05)
    served = joint.served_by(target)
    ids = torch.tensor(prompts_of(11, 11))
    document = (torch.arange(11) >= 6).long().expand(2, 11) + torch.tensor([[0], [2]])
    own, *drafted = logits_of(joint, batch_of(target, joint, ids, document), target)
    decoding = batch_of(served, joint.drafter, ids, document)
    plain = logits_of(joint.drafter, decoding, served)
    torch.testing.assert_close(drafted, plain, atol=1e-4, rtol=1e-4)
    labelled = [*range(5), *range(6, 10), *range(11, 16), *range(17, 21)]
    theirs = served.head(decoding.last.flatten(0, 1)[labelled])
    torch.testing.assert_close(own, theirs, atol=1e-4, rtol=1e-4)
    bare = target.head(batch_of(target, joint, ids, document).last.flatten(0, 1)[labelled])
    assert (own - bare).abs().max() > 0.1
    assert joint.served_by(target) is served  # until the adapter moves


def test_a_prediction_sees_nothing_later(target: Target) -> None:
    joint = joint_of(target, distance=0.05)
    ids = torch.tensor(prompts_of(16))
    changed = ids.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 128
    before, after = (logits_of(joint, batch_of(target, joint, x), target) for x in (ids, changed))
    for one, two in zip(before, after, strict=True):  # by the token whose state is read
        torch.testing.assert_close(one[:8], two[:8], atol=1e-4, rtol=1e-4)
        assert (one[8:] - two[8:]).abs().max() > 1e-2


def test_gradients_reach_the_drafter_and_the_adapter_alone(target: Target) -> None:
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    joint = joint_of(target, distance=0.05).train()
    objective = Objective(joint, target, LossSettings(), 0.2)
    lesson = lessons_of(examples_of(20, 14), target, joint.features)[0]
    objective(lesson).loss.sum().backward()
    names = {name for name, p in joint.named_parameters() if p.grad is not None and p.grad.any()}
    assert names == {name for name, _ in joint.named_parameters()}
    assert len(joint.adapter.updates) == 7 * target.shape.num_layers
    beside = {name for name in joint.state_dict() if not name.startswith("drafter.")}
    assert len(beside) == 2 * len(joint.adapter.updates)
    assert all("lora_" in name for name in beside)  # nothing of the target's
    assert all(p.grad is None for p in target.model.parameters())
    for name, value in target.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_loss_is_kl_to_the_frozen_target_plus_a_share_of_the_heads(target: Target) -> None:
    joint = joint_of(target, distance=0.05)
    lesson = lessons_of(examples_of(20, 14), target, joint.features)[0]
    whole = Objective(joint, target, LossSettings(), 0.2)
    sums = whole(lesson)
    own, *heads = logits_of(joint, lesson.batch, target)
    places = joint.predict(lesson.batch, target)[0].positions
    frozen = target.head(lesson.batch.last.flatten(0, 1)[places]).log_softmax(-1)
    kl = (frozen.exp() * (frozen - own.log_softmax(-1))).sum(-1)
    assert sums.loss[0].item() == pytest.approx(kl.sum().item(), rel=1e-4)
    assert sums.weight.tolist() == pytest.approx(
        [len(own), *(0.2 * 0.8**d * len(head) for d, head in enumerate(heads))]
    )
    agreement = (own.argmax(-1) == frozen.argmax(-1)).float().mean().item()
    found = held_out_metrics(whole, lessons_of(examples_of(20, 14), target, joint.features))
    assert found["target_agreement"] == pytest.approx(agreement, abs=0.2)
    depths = {f"{kind}/{d}" for kind in ("agreement", "overlap") for d in (1, 2, 3, 4)}
    assert set(found) == depths | {"loss", "target_agreement", "target_overlap"}
    assert "of the target with the frozen one 0." in line(1, 0.5, found)
    tempered = Objective(joint, target, LossSettings(temperature=0.5), 0.2)
    other = replace(lesson, summary=lesson.summary._replace(tempered=lesson.summary.tempered * 2))
    assert tempered(other).loss[0].item() == pytest.approx(sums.loss[0].item(), rel=1e-4)


@pytest.mark.slow
def test_what_is_published_decides_with_its_adapter(base: Path, tmp_path: Path) -> None:
    target = Target.load(base)
    measured: list[Fingerprint] = []

    def measure(drafter: NeuralDrafter) -> dict[str, float]:
        measured.append(Fingerprint.of(served_by(drafter, target)))
        return {"tau": 2.0}

    settings = settings_of(tmp_path, adapter=SETTINGS, evaluate=EvaluateSettings(times=1))
    trainer_of(target, settings, measure=measure).train()
    prompts = prompts_of(4, 7, vocab_size=265)
    for name in ("best", "last"):
        folder = tmp_path / name
        served = Target.load(folder / ADAPTER)
        assert Fingerprint.of(served).difference(measured[0]) is None
        drafter = load_drafter(folder, served)
        assert drafter.name == "medusa"
        with pytest.raises(UserError, match=f"was made for another target .{base} . adapter.: its"):
            load_drafter(folder, target)
    drafted = generate(served, drafter, prompts, growth=Chain(3), max_new_tokens=12)
    plain = generate(served, NoDrafter(), prompts, max_new_tokens=12)
    assert [x.ids for x in drafted] == [x.ids for x in plain]
    assert Fingerprint.of(served_from(folder, target)) == Fingerprint.of(served)
    assert served_from(tmp_path, target) is target
    # the folder is PEFT's own: transformers and peft make the same of it
    loader: Any = AutoModelForCausalLM
    theirs = loader.from_pretrained(folder / ADAPTER)
    ids = torch.tensor(prompts[:1])
    torch.testing.assert_close(theirs(ids).logits, served.model(ids).logits, atol=1e-3, rtol=1e-3)
    assert (target.model(ids).logits - served.model(ids).logits).abs().max() > 1e-2
    assert served.tokenizer.chat_template == target.tokenizer.chat_template
    told = json.loads((folder / "config.json").read_text())["target"]
    assert told["base"] == str(base)


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path: Path, target: Target) -> None:
    """Dropout's coins included."""
    straight = trainer_of(target, settings_of(tmp_path / "a", adapter=SETTINGS))
    straight.train()
    broken = trainer_of(target, settings_of(tmp_path / "b", adapter=SETTINGS))
    stop_after(broken, 3)
    broken.train()
    resumed = trainer_of(target, settings_of(tmp_path / "b", adapter=SETTINGS, resume=True))
    resumed.train()
    for key, value in weights(straight.drafter).items():
        assert torch.equal(value, weights(resumed.drafter)[key]), key


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": -1}, r"adapter\.rank is -1"),
        ({"alpha": 0}, r"adapter\.alpha is 0"),
        ({"dropout": 1.0}, r"adapter\.dropout is 1\.0"),
        ({"drafting": 0.0}, r"adapter\.drafting is 0\.0"),
    ],
)
def test_ranges_are_checked(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        AdapterSettings(**changes)


def test_an_adapter_needs_a_plain_target(target: Target, base: Path) -> None:
    both = {"adapter": SETTINGS, "optim": OptimSettings(lora_rank=2)}
    with pytest.raises(UserError, match=r"adapter\.rank \(of the target\) and optim\.lora_rank"):
        TrainSettings(target="x", output="y", **both)  # type: ignore[arg-type]
    small = Target.load(base, dtype="bfloat16")
    with pytest.raises(UserError, match="which is in bfloat16: give a plain target"):
        joint_of(small)
    with pytest.raises(UserError, match="which is quantised"):
        joint_of(Target.load(base, weights="int8", engine="reference"))
    with pytest.raises(UserError, match="which is made with an adapter already"):
        joint_of(joint_of(target).served_by(target))

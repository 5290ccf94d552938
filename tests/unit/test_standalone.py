"""The standalone drafter: how it starts, which layers, and what a copy of all of them is worth."""

import math
from pathlib import Path

import pytest
import torch

from drafters.base import Batch, Features
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.growth import Chain
from drafters.losses import LossSettings, drafter_loss
from drafters.methods.standalone import StandaloneDrafter
from drafters.target import Target
from drafters.teacher import Teacher
from inference import generate
from tests.folders import save_tiny_target
from tests.tiny import prompts_of, tiny_target
from tests.unit.test_objective import drafter_of, examples_of, lessons_of
from training.objective import Objective
from training.optim import make_optimizer
from training.options import OptimSettings


def standalone(target: Target, **options: object) -> StandaloneDrafter:
    drafter = StandaloneDrafter.build({"draft_vocab_size": 0, **options}, target.shape)
    drafter.init_from(target)
    return drafter.eval()


def batch_of(target: Target, ids: torch.Tensor) -> Batch:
    document = torch.zeros_like(ids)
    position = torch.arange(ids.shape[1]).expand_as(ids)
    _, last = target.forward_batch(ids, document, position, Features())
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), document, position, None, last)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", {}), ("qwen2", {"attention_bias": True}), ("qwen3", {"qk_norm": True})],
)
def test_a_copy_of_all_layers_is_the_target(family: str, kind: dict[str, object]) -> None:
    """Zero loss, everything accepted: alignment, phases, norms and head are the target's."""
    target = tiny_target(family, num_hidden_layers=3)
    drafter = standalone(target, num_layers=3, **kind)
    batch = batch_of(target, torch.tensor(prompts_of(12, 12)[:1]))
    teacher = Teacher(target, None)
    sums = drafter_loss(drafter.predict(batch, target), batch, teacher, LossSettings())
    assert sums.loss.item() == pytest.approx(0, abs=1e-3)
    assert sums.agreement.item() == sums.counted.item() == 11
    for draft, temperature in (("argmax", 0.0), ("sampled", 0.9)):
        outputs = generate(
            target,
            drafter,
            prompts_of(9, 4, 1),
            growth=Chain(3, draft),
            max_new_tokens=17,
            temperature=temperature,
        )
        assert [output.tau for output in outputs] == [4] * 3


def test_layers_of_another_kind_are_refused() -> None:
    with pytest.raises(UserError, match="have q_norm: give qk_norm=true"):
        standalone(tiny_target("qwen3", num_hidden_layers=2), num_layers=1)
    with pytest.raises(UserError, match="lack q_norm: give qk_norm=false"):
        standalone(tiny_target(num_hidden_layers=2), num_layers=1, qk_norm=True)


@pytest.mark.parametrize(
    ("count", "chosen"), [(1, (0,)), (2, (0, 6)), (3, (0, 3, 6)), (4, (0, 2, 4, 6))]
)  # fmt: skip
def test_layers_are_spread_from_the_first_to_the_last(count: int, chosen: tuple[int, ...]) -> None:
    shape = tiny_target(num_hidden_layers=7).shape
    drafter = StandaloneDrafter.build({"num_layers": count}, shape)
    assert drafter.options()["layers"] == chosen


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_layers": 0}, "num_layers is 0: give 1 or more"),
        ({"num_layers": 9}, "num_layers is 9: give 1 to 4"),
        ({"layers": [0, 4]}, "from 0 to 3"),
        ({"layers": [1, 1]}, "distinct layers, ascending"),
        ({"layers": []}, "one or more distinct layers"),
        ({"model": "/nowhere"}, "model '/nowhere':"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        StandaloneDrafter.build(options, tiny_target().shape)


def test_named_layers_are_those_of_the_target() -> None:
    target = tiny_target()
    drafter = standalone(target, layers=[1, 3])
    for layer, index in zip(drafter.decoder_layers(), (1, 3), strict=True):
        assert torch.equal(layer.down.weight, target.layer_state(index)["mlp.down_proj.weight"])


@pytest.mark.slow
def test_another_model_gives_layers_embedding_and_head(tmp_path: Path) -> None:
    """Of another width than the target; published whole, so that the folder alone is enough."""
    target = Target.load(save_tiny_target(tmp_path / "target"))
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "seed": 3}
    small = Target.load(save_tiny_target(tmp_path / "small", **sizes))  # type: ignore[arg-type]
    drafter = standalone(target, model=str(tmp_path / "small"), num_layers=2)
    batch = batch_of(target, torch.tensor(prompts_of(12)))
    (guess,) = drafter.predict(batch, target)
    wanted = small.head(batch_of(small, batch.ids).last)[0, :-1]
    torch.testing.assert_close(guess.logits(slice(0, 11)), wanted, atol=1e-4, rtol=1e-4)
    save_drafter(drafter, tmp_path / "drafter", target)
    (tmp_path / "small" / "config.json").unlink()
    loaded = load_drafter(tmp_path / "drafter", target)
    outputs = [generate(target, x, prompts_of(5), max_new_tokens=9)[0] for x in (drafter, loaded)]
    assert outputs[0].accepted == outputs[1].accepted
    other = save_tiny_target(tmp_path / "other", vocab_size=270)
    with pytest.raises(UserError, match="has 270 ids, the target 265"):
        standalone(target, model=str(other))


def test_distillation_lowers_the_loss_with_both_kinds_in_turn() -> None:
    target = tiny_target(num_hidden_layers=7, initializer_range=0.2)
    drafter = drafter_of(target, "standalone", num_layers=2, draft_vocab_size=0)
    objective = Objective(drafter, target, LossSettings(kind="kl", then="lk", then_from=0.5))
    lessons = lessons_of(examples_of(20, 14, 17), target, drafter.features, keep="memory")
    optimizer = make_optimizer(drafter, OptimSettings(lr=3e-3))
    losses: list[list[float]] = [[], []]
    for step in range(24):
        objective.progress = step / 24
        sums = objective(lessons[0])
        loss = sums.loss.sum() / sums.weight.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step // 12].append(loss.item())
    for part in losses:
        assert all(map(math.isfinite, part))
        assert part[-1] < 0.9 * part[0]

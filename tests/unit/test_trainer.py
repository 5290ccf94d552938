"""The training loop: exact resume, accumulation, milestones, skipped steps, what is published."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file

from drafters.base import Batch, NeuralDrafter
from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.losses import LossSettings
from drafters.rounding import rounded
from drafters.target import Target
from inference.stats import Round, acceptance
from tests.tiny import tiny_target
from tests.unit.test_objective import drafter_of, examples_of, lessons_of
from training.acceptance import by_name
from training.adapters import add_adapters
from training.batches import order_of
from training.examples import Example
from training.features import Lesson
from training.joint import Joint
from training.objective import Objective
from training.options import (
    EvaluateSettings,
    OptimSettings,
    ScheduleSettings,
    TrackingSettings,
    TrainSettings,
)
from training.state import STATE, Progress
from training.trainer import Run, Trainer


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=7, initializer_range=0.2)


def settings_of(folder: Path, **changes: object) -> TrainSettings:
    """Make settings of 8 steps without measurements; `changes` are sections or values."""
    base = TrainSettings(
        target="tiny",
        output=str(folder),
        schedule=ScheduleSettings(epochs=None, steps=8),
        evaluate=EvaluateSettings(times=0),
        tracking=TrackingSettings(trackers=[]),
        optim=OptimSettings(lr=1e-2),
        save_times=0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def trainer_of(
    target: Target,
    settings: TrainSettings,
    *,
    name: str = "medusa",
    examples: list[Example] | None = None,
    measure: Callable[[NeuralDrafter], dict[str, float]] | None = None,
    accelerator: Accelerator | None = None,
    identity: dict[str, object] | None = None,
) -> Trainer:
    drafter = drafter_of(target, name)
    if settings.optim.lora_rank:
        add_adapters(drafter, settings.optim)
    drafting = None
    if settings.adapter.rank:
        drafter, drafting = Joint(drafter, target, settings.adapter), settings.adapter.drafting
    chats = examples or examples_of(20, 14, 17, 30, 25, 11, 19, 23, 28, 16)
    groups = [[i] for i in range(len(chats))]
    run = Run(
        Objective(drafter, target, LossSettings(), drafting),
        lessons_of(chats, target, drafter.features, keep="memory", groups=groups),
        lessons_of(examples_of(18, 22, seed=9), target, drafter.features, keep="memory"),
        measure,
        identity or {"seed": 0},
    )
    return Trainer(run, settings, accelerator or Accelerator(cpu=True))


def weights(drafter: NeuralDrafter) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in drafter.state_dict().items()}


def stop_after(trainer: Trainer, steps: int) -> None:
    """Let the process get SIGTERM while it makes step number `steps`."""

    def tick(_share: float) -> None:
        if trainer.progress.step == steps:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.run = replace(trainer.run, tick=tick)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["medusa", pytest.param("eagle", marks=pytest.mark.slow)])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a31_a32_a_stopped_run_goes_on_as_if_it_had_not(
    tmp_path: Path, target: Target, name: str, accumulate: int
) -> None:
    # cases A31 and A32: 10 batches, so groups of four leave a last group of two in every epoch
    optim = OptimSettings(lr=1e-2, accumulate=accumulate)
    straight = trainer_of(target, settings_of(tmp_path / "a", optim=optim), name=name)
    assert straight.train() is None
    broken = trainer_of(target, settings_of(tmp_path / "b", optim=optim), name=name)
    stop_after(broken, 5)
    assert broken.train() == signal.SIGTERM
    assert broken.progress.step == 5
    resumed = trainer_of(target, settings_of(tmp_path / "b", optim=optim, resume=True), name=name)
    assert resumed.progress == replace(broken.progress)
    assert resumed.train() is None
    assert resumed.progress.step == straight.progress.step == 8
    assert resumed.progress.epoch == straight.progress.epoch == (0 if accumulate == 1 else 2)
    for key, value in weights(straight.drafter).items():
        assert torch.equal(value, weights(resumed.drafter)[key]), key
    saved = load_file(tmp_path / "a" / STATE), load_file(tmp_path / "b" / STATE)
    assert saved[0].keys() == saved[1].keys()
    for key, value in saved[0].items():
        assert torch.equal(value, saved[1][key]), key


def test_accumulated_batches_make_the_step_that_one_batch_makes(
    tmp_path: Path, target: Target
) -> None:
    chats = examples_of(16, answer=8) + examples_of(13, answer=3, seed=1)
    results = []
    for groups, accumulate in (([[0], [1]], 2), ([[0, 1]], 1)):
        optim = OptimSettings(lr=1e-2, accumulate=accumulate)
        trainer = trainer_of(target, settings_of(tmp_path, optim=optim), examples=chats)
        trainer.run.lessons.groups = groups
        trainer.step(0.5)
        results.append(weights(trainer.drafter))
    # AdamW scales tiny gradients up, and their rounding with them
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-3)


def test_local_normalisation_gives_batches_the_same_say(tmp_path: Path, target: Target) -> None:
    chats = examples_of(16, answer=8) + examples_of(13, answer=3, seed=1)
    optim = OptimSettings(accumulate=2, normalise="local", clip=0.0)
    trainer = trainer_of(target, settings_of(tmp_path, optim=optim), examples=chats)
    trainer._accumulate([0, 1])
    trainer._finish_gradients(torch.ones(()))
    found = [p.grad.clone() for p in trainer.drafter.parameters() if p.grad is not None]
    trainer.drafter.zero_grad()
    for index in range(2):
        sums = trainer.run.objective(trainer.run.lessons[index])
        (sums.loss.sum() / sums.weight.sum() / 2).backward()
    wanted = [p.grad for p in trainer.drafter.parameters() if p.grad is not None]
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_a35_milestones_count_optimizer_steps_and_leave_training_on(
    tmp_path: Path, target: Target
) -> None:
    # case A35: evaluate every 2 steps, save every 4, accumulation 2
    settings = settings_of(
        tmp_path,
        optim=OptimSettings(accumulate=2),
        evaluate=EvaluateSettings(times=4),
        save_times=2,
    )
    events: list[str] = []

    def measure(drafter: NeuralDrafter) -> dict[str, float]:
        assert not drafter.training
        assert not target.model.training
        events.append(f"evaluate {trainer.progress.step}")
        return {"tau": 2.0}

    trainer = trainer_of(target, settings, measure=measure)
    save = trainer.save

    def saved() -> None:
        events.append(f"save {trainer.progress.step}")
        save()

    trainer.save = saved  # type: ignore[method-assign]
    trainer.run = replace(trainer.run, tick=lambda _: events.append(str(trainer.drafter.training)))
    trainer.train()
    assert "False" not in events
    told = [event for event in events if event != "True"]
    assert [e for e in told if e.startswith("evaluate")] == [f"evaluate {s}" for s in (2, 4, 6, 8)]
    # an evaluation saves too; the end saves once more
    assert [e for e in told if e.startswith("save")] == [f"save {s}" for s in (2, 4, 6, 8, 8)]


def test_saves_without_evaluations_come_at_their_own_steps(tmp_path: Path, target: Target) -> None:
    trainer = trainer_of(target, settings_of(tmp_path, save_times=2))
    steps: list[int] = []
    trainer.save = lambda: steps.append(trainer.progress.step)  # type: ignore[method-assign]
    trainer.train()
    assert steps == [4, 8, 8]


def test_a36_the_best_drafter_by_tau_is_published_and_loads(tmp_path: Path, target: Target) -> None:
    taus = iter((1.5, 2.0, 1.0, 2.0))
    published: list[dict[str, torch.Tensor]] = []

    def measure(drafter: NeuralDrafter) -> dict[str, float]:
        published.append(weights(drafter))
        return {"tau": next(taus)}

    settings = settings_of(tmp_path, evaluate=EvaluateSettings(times=4))
    trainer = trainer_of(target, settings, measure=measure)
    trainer.train()
    best = json.loads((tmp_path / "best" / "config.json").read_text())["training"]
    assert best["step"] == 8  # of equals the later one
    assert best["metrics"]["tau"] == 2.0
    # case A36: every tensor of the file is the live one; what was measured is what is published
    masters = weights(trainer.drafter)
    for name, found in (("best", published[3]), ("last", masters)):
        file = load_file(tmp_path / name / "model.safetensors")
        assert file.keys() == found.keys()
        for key, value in found.items():
            kind = torch.bfloat16 if value.is_floating_point() else value.dtype
            assert file[key].dtype == kind
            assert torch.equal(file[key], value.to(kind))
            if name == "best":
                assert torch.equal(file[key].to(value.dtype), value)
    # the masters keep what rounding would lose
    assert any(
        not torch.equal(m, m.bfloat16().float()) for m in masters.values() if m.is_floating_point()
    )
    loaded = load_drafter(tmp_path / "best", target)
    assert isinstance(loaded, NeuralDrafter)
    lesson = trainer.run.lessons[0]
    with torch.no_grad(), rounded(trainer.drafter, torch.bfloat16):
        for one, two in zip(
            loaded.predict(lesson.batch, target),
            trainer.drafter.predict(lesson.batch, target),
            strict=True,
        ):
            assert torch.equal(one.logits(slice(0, 3)), two.logits(slice(0, 3)))


def test_without_prompts_agreement_decides(tmp_path: Path, target: Target) -> None:
    trainer = trainer_of(target, settings_of(tmp_path, evaluate=EvaluateSettings(times=1)))
    trainer.train()
    assert trainer.progress.best_tau >= 0
    assert (tmp_path / "best" / "config.json").exists()


def spoilt(lesson: Lesson, value: float) -> Lesson:
    last = lesson.batch.last.clone()
    last[0, -2] = value
    batch = lesson.batch
    other = Batch(batch.ids, batch.label_mask, batch.document, batch.position, batch.taps, last)
    return replace(lesson, batch=other)


def test_a29_a_step_that_is_not_finite_is_skipped_and_counted(
    tmp_path: Path, target: Target
) -> None:
    # case A29, in training
    trainer = trainer_of(target, settings_of(tmp_path))
    for index in range(len(trainer.run.lessons)):
        lesson = trainer.run.lessons[index]
        if index == 3:
            trainer.run.lessons._kept[index] = spoilt(lesson, float("nan"))
    trainer.settings.schedule.steps = 10  # an epoch
    trainer.train()
    assert (trainer.progress.step, trainer.progress.skipped) == (10, 1)
    assert all(torch.isfinite(value).all() for value in weights(trainer.drafter).values())


def test_three_steps_in_a_row_that_are_not_finite_end_the_run(
    tmp_path: Path, target: Target
) -> None:
    lines: list[str] = []
    trainer = trainer_of(target, settings_of(tmp_path))
    trainer.mishaps.say = lines.append
    order = order_of(10, trainer.settings.seed, 0)
    for place in (1, 3, 4, 5):  # one alone is survived
        index = order[place]
        lesson = trainer.run.lessons[index]
        trainer.run.lessons._kept[index] = spoilt(lesson, float("nan"))
    with pytest.raises(UserError, match=r"3 steps in a row .*not_finite\.0\.safetensors"):
        trainer.train()
    assert (trainer.progress.step, trainer.progress.skipped) == (5, 4)
    assert [line.split(":")[0] for line in lines] == [f"step {n} left out" for n in (2, 4, 5, 6)]
    saved = load_file(tmp_path / "not_finite.0.safetensors")
    batch = trainer.run.lessons[order[5]].batch
    assert torch.equal(saved["0.ids"], batch.ids)
    assert bool(saved["0.last"].isnan().any())
    for value in weights(load_drafter(tmp_path / "last", target)).values():  # type: ignore[arg-type]
        assert bool(torch.isfinite(value).all())


def test_a27_a_batch_without_a_supervised_token_is_skipped_and_counted(
    tmp_path: Path, target: Target
) -> None:
    # case A27: the second of three samples has an empty answer
    chats = examples_of(16, 9, 13)
    chats[1] = replace(chats[1], label_mask=torch.zeros(9, dtype=torch.bool))
    trainer = trainer_of(target, settings_of(tmp_path), examples=chats)
    trainer.settings.schedule.steps = 3
    before = weights(trainer.drafter)
    trainer.train()
    assert trainer.progress.skipped == 1
    told = trainer.window.read()
    assert all(torch.isfinite(torch.tensor(list(told.values()))))
    after = weights(trainer.drafter)
    assert any(not torch.equal(before[key], after[key]) for key in before)


def test_metrics_have_their_fixed_names(tmp_path: Path, target: Target) -> None:
    settings = settings_of(tmp_path, evaluate=EvaluateSettings(times=2))
    found = by_name(acceptance([Round(1, 2, 4, 2), Round(2, 2, 4, 3)]))
    trainer = trainer_of(target, settings, measure=lambda _: found)
    lines: list[dict[str, float]] = []
    trainer.accelerator.log = lambda values, step: lines.append({"step": step, **values})  # type: ignore[method-assign]
    trainer.train()
    by_depth = {f"{kind}/{d}" for kind in ("agreement", "overlap") for d in (1, 2, 3, 4)}
    accepted = {f"{kind}/{d}" for kind in ("alpha", "survival") for d in (1, 2)}
    measured = {"step", "loss", "tau"} | accepted | by_depth
    trained = {f"train/agreement/{d}" for d in (1, 2, 3, 4)} | {"train/loss", "step", "epoch"}
    trained |= {"learning_rate", "tokens_per_second", "skipped_steps", "memory"}
    assert [set(line) for line in lines] == [measured, trained, measured]
    assert lines[0]["tau"] == 2.5
    assert lines[0]["alpha/2"] == lines[0]["survival/2"] == 0.5
    assert 0.05 < lines[1]["memory"] < 32


def test_a_time_budget_ends_the_run(tmp_path: Path, target: Target) -> None:
    schedule = ScheduleSettings(epochs=None, time_budget="0.2s")
    trainer = trainer_of(target, settings_of(tmp_path, schedule=schedule))
    trainer.train()
    assert trainer.progress.step >= 1
    assert 0.2 <= trainer.progress.elapsed < 5
    again = trainer_of(target, settings_of(tmp_path, schedule=schedule, resume=True))
    assert again.share == 1


def test_a_time_budget_is_a_schedule(tmp_path: Path, target: Target) -> None:
    """The rate follows the share of the minutes, those before a resume included."""
    schedule = ScheduleSettings(epochs=None, time_budget="12m", kind="linear", warmup=0.0)
    trainer = trainer_of(target, settings_of(tmp_path, schedule=schedule))
    for minutes, left in ((0, 1.0), (3, 0.75), (9, 0.25)):
        trainer._before = minutes * 60.0
        share = trainer.share
        assert share == pytest.approx(1 - left, abs=0.02)
        trainer.step(share)
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * left, rel=0.05)


def test_epochs_end_the_run(tmp_path: Path, target: Target) -> None:
    schedule = ScheduleSettings(epochs=1.5)
    trainer = trainer_of(target, settings_of(tmp_path, schedule=schedule))
    trainer.train()
    assert (trainer.progress.step, trainer.progress.epoch, trainer.progress.place) == (15, 1, 5)


@pytest.mark.slow
@pytest.mark.parametrize("resume", [False, True])
def test_a30_norms_move_although_a_step_is_below_bfloat16(
    tmp_path: Path, target: Target, resume: bool
) -> None:
    # case A30: parameters stay float32 under bf16
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        changes = {
            "precision": "bf16",
            "optim": OptimSettings(lr=1e-4),
            "schedule": ScheduleSettings(epochs=None, steps=50, kind="constant"),
        }
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        trainer = trainer_of(
            target, settings_of(tmp_path, **changes), name="eagle", accelerator=accelerator
        )
        for norm in (m for m in trainer.drafter.modules() if isinstance(m, torch.nn.RMSNorm)):
            torch.nn.init.ones_(norm.weight)
        start = weights(trainer.drafter)
        if resume:
            stop_after(trainer, 25)
            trainer.train()
            settings = settings_of(tmp_path, resume=True, **changes)
            trainer = trainer_of(target, settings, name="eagle", accelerator=accelerator)
        trainer.train()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    now = weights(trainer.drafter)
    norms = [key for key in now if "norm" in key]
    assert norms
    for key in norms:
        assert now[key].dtype == torch.float32
        assert (now[key] != start[key]).float().mean() > 0.9


def test_a_state_of_other_settings_or_data_is_refused(tmp_path: Path, target: Target) -> None:
    first = {"optim": {"lr": 0.1}, "chats": "aa"}
    trainer_of(target, settings_of(tmp_path), identity=first).train()
    for changed, said in (
        ({"optim": {"lr": 0.2}, "chats": "aa"}, r"optim\.lr = 0\.1, this one 0\.2"),
        ({"optim": {"lr": 0.1}, "chats": "bb"}, "chats = aa, this one bb"),
        ({"optim": {"lr": 0.1}}, "chats = aa, this one None"),
    ):
        with pytest.raises(UserError, match=said):
            trainer_of(target, settings_of(tmp_path, resume=True), identity=changed)


@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_a_damaged_state_is_refused(tmp_path: Path, target: Target, damage: str) -> None:
    trainer_of(target, settings_of(tmp_path)).train()
    file = tmp_path / STATE
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    else:
        save_file({"x": torch.ones(2)}, file)
    with pytest.raises(UserError, match="not a state this version can go on from"):
        trainer_of(target, settings_of(tmp_path, resume=True))


def test_a_kill_while_saving_leaves_the_earlier_state(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(target, settings_of(tmp_path))
    trainer.step(0.5)
    trainer.save()
    before = (tmp_path / STATE).read_bytes()
    trainer.step(0.6)

    def killed(self: Path, _new: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.save()
    assert (tmp_path / STATE).read_bytes() == before
    resumed = trainer_of(target, settings_of(tmp_path, resume=True))
    assert resumed.progress.step == 1
    assert load_drafter(tmp_path / "last", target)


def test_progress_is_plain_data() -> None:
    assert Progress(**json.loads(json.dumps(Progress(3, 1, 2).__dict__))) == Progress(3, 1, 2)

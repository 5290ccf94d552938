"""Lessons that a drafter writes itself: what is kept, what is new, and that runs stay exact."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafters.errors import UserError
from drafters.target import Target
from tests.tiny import tiny_target
from tests.unit.test_objective import drafter_of, examples_of, lessons_of
from tests.unit.test_trainer import settings_of, stop_after, trainer_of, weights
from training.lesson_settings import OnPolicySettings
from training.on_policy import OnPolicy, write


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=7, initializer_range=0.2)


def test_prompts_stay_and_answers_are_the_drafters(target: Target) -> None:
    drafter = drafter_of(target, "standalone", num_layers=2)
    chats = examples_of(20, 14, 9)
    lessons = lessons_of(chats, target, drafter.features, groups=[[0, 1, 2]])
    settings = OnPolicySettings(share=1.0, tokens=5)
    lesson = OnPolicy(lessons, drafter, settings, seed=3).lesson(0, step=4)
    for row, chat in enumerate(chats):
        start = len(chat.prompt)
        assert lesson.batch.ids[row, :start].tolist() == chat.prompt
        new = lesson.batch.ids[row, start : start + 5]
        assert set(new.tolist()) <= set(drafter.ids.tolist())  # type: ignore[union-attr]
        mask = lesson.batch.label_mask[row].nonzero()[:, 0].tolist()
        assert mask == list(range(start, start + 5))
    again = OnPolicy(lessons, drafter, settings, seed=3).lesson(0, step=4)
    other = OnPolicy(lessons, drafter, settings, seed=3).lesson(0, step=5)
    assert torch.equal(lesson.batch.ids, again.batch.ids)
    assert not torch.equal(lesson.batch.ids, other.batch.ids)


def test_at_a_low_temperature_the_drafter_writes_its_own_argmax(target: Target) -> None:
    drafter = drafter_of(target, "standalone", num_layers=2)
    prompt = examples_of(12)[0].ids.tolist()
    settings = OnPolicySettings(share=1.0, tokens=4, temperature=1e-3)
    (new,) = write(drafter, target, [prompt], settings, seed=0)
    text = [*prompt, *new, 0]
    (example,) = examples_of(len(text), answer=len(text) - 1)
    lessons = lessons_of([replace(example, ids=torch.tensor(text))], target, drafter.features)
    (guess,) = drafter.predict(lessons[0].batch, target)
    best = guess.logits(slice(0, len(text))).argmax(-1)[len(prompt) - 1 : len(prompt) + 3]
    assert drafter.ids is not None
    assert drafter.ids[best].tolist() == new


def test_an_answer_ends_where_the_target_would_end_it() -> None:
    target = tiny_target(num_hidden_layers=2, eos_token_id=list(range(128)))
    drafter = drafter_of(target, "standalone", num_layers=2)
    settings = OnPolicySettings(share=1.0, tokens=4)
    assert [len(x) for x in write(drafter, target, [[5, 6], [7]], settings, 0)] == [1, 1]


def test_a_share_is_kept_and_none_is_none(target: Target) -> None:
    drafter = drafter_of(target, "standalone", num_layers=2)
    lessons = lessons_of(examples_of(9), target, drafter.features, keep="memory")
    known = lessons[0]
    half = OnPolicy(lessons, drafter, OnPolicySettings(share=0.5, tokens=2), seed=0)
    same = [half.lesson(0, step).batch.ids.shape == known.batch.ids.shape for step in range(40)]
    assert 10 < sum(same) < 30
    none = OnPolicy(lessons, drafter, OnPolicySettings(), seed=0)
    assert torch.equal(none.lesson(0, 0).batch.ids, known.batch.ids)


def test_a_drafter_that_reads_states_cannot_write(tmp_path: Path, target: Target) -> None:
    settings = settings_of(tmp_path, on_policy=OnPolicySettings(share=0.5))
    with pytest.raises(UserError, match="medusa reads the target's states and cannot write alone"):
        trainer_of(target, settings)
    with pytest.raises(UserError, match=r"on_policy\.share is 2"):
        OnPolicySettings(share=2.0)


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path: Path, target: Target) -> None:
    changes = {"on_policy": OnPolicySettings(share=0.5, tokens=4)}
    straight = trainer_of(target, settings_of(tmp_path / "a", **changes), name="standalone")
    straight.train()
    broken = trainer_of(target, settings_of(tmp_path / "b", **changes), name="standalone")
    stop_after(broken, 3)
    broken.train()
    resumed = trainer_of(
        target, settings_of(tmp_path / "b", resume=True, **changes), name="standalone"
    )
    resumed.train()
    assert resumed.progress.step == straight.progress.step == 8
    for key, value in weights(straight.drafter).items():
        assert torch.equal(value, weights(resumed.drafter)[key]), key

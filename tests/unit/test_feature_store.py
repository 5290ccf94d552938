"""Stored features: equal to those of the moment, bit for bit, found again after a kill."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafters.base import Features
from drafters.errors import UserError
from drafters.losses import LossSettings, LossSums
from drafters.target import Target
from tests.tiny import tiny_target
from tests.unit.test_objective import drafter_of, examples_of
from tests.unit.test_trainer import settings_of, stop_after, trainer_of, weights
from training import feature_store
from training.batches import compose, documents
from training.examples import Example, pack
from training.feature_store import ABOUT, FeatureStore, Kind
from training.features import Lessons
from training.lesson_settings import FeatureSettings
from training.objective import Objective
from training.trainer import Trainer

LAYERS = (1, 3)
CHATS = examples_of(20, 14, 17, 30, 25, 11)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=7, initializer_range=0.2)


def store_of(
    folder: Path, target: Target, layers: Sequence[int] = LAYERS, dtype: str = "bfloat16"
) -> FeatureStore:
    return FeatureStore(folder, Kind.of(target, layers, dtype))


def lessons_of(
    target: Target,
    store: FeatureStore | None,
    features: Features | None = None,
    examples: Sequence[Example] = CHATS,
    loss: LossSettings | None = None,
    dtype: str = "bfloat16",
) -> Lessons:
    return Lessons(
        examples,
        compose([len(e) for e in examples], 64, seed=0),
        target=target,
        features=features or Features(LAYERS),
        settings=FeatureSettings("none", dtype),
        loss=loss or LossSettings(),
        store=store,
    )


def filled(folder: Path, target: Target, examples: Sequence[Example] = CHATS) -> None:
    lessons = lessons_of(target, store_of(folder, target), examples=examples)
    for index in range(len(lessons)):
        lessons.make(index)
    lessons.flush()


def forbid(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the target ran")

    monkeypatch.setattr(target, "forward_batch", never)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(("name", "options"), [("eagle", {"taps": [1, 3, 5]}), ("medusa", {})])
def test_losses_on_stored_features_are_bit_equal(
    tmp_path: Path,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, object],
    temperature: float,
) -> None:
    drafter = drafter_of(target, name, **options)
    objective = Objective(drafter, target, LossSettings(temperature=temperature))

    def losses(lessons: Lessons) -> list[LossSums]:
        return [objective(lessons[index]) for index in range(len(lessons))]

    def lessons(store: FeatureStore | None) -> Lessons:
        return lessons_of(target, store, drafter.features, loss=objective.settings)

    online = losses(lessons(None))
    layers = drafter.features.layers
    first = lessons(store_of(tmp_path, target, layers))
    filling = losses(first)
    first.flush()
    forbid(target, monkeypatch)
    read = losses(lessons(store_of(tmp_path, target, layers)))
    for one, two, three in zip(online, filling, read, strict=True):
        for left, middle, right in zip(one, two, three, strict=True):
            assert torch.equal(left, middle)
            assert torch.equal(left, right)


def test_states_end_before_the_last_label_and_padding_is_not_kept(
    tmp_path: Path, target: Target
) -> None:
    ids = torch.arange(3, 13)
    chats = [
        Example("a", ids, (ids > 5) & (ids < 10)),  # the last label stands at 6
        Example("b", ids.flip(0), torch.ones(10, dtype=torch.bool)),
    ]
    filled(tmp_path, target, chats)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    assert {k: (tuple(v.shape), v.dtype) for k, v in tensors.items()} == {
        "taps": ((6 + 9, 2 * 64), torch.bfloat16),
        "last": ((6 + 9, 64), torch.bfloat16),
        "normaliser": ((6 + 9,), torch.float32),
        "best": ((6 + 9,), torch.int32),
    }
    kind = Kind.of(target, LAYERS, "bfloat16")
    assert sum(v.nbytes for v in tensors.values()) == 15 * kind.token_bytes
    fresh = store_of(tmp_path / "other", target)
    assert fresh.missing_bytes(documents(chats)) == 15 * kind.token_bytes
    assert store_of(tmp_path, target).missing_bytes(documents(chats)) == 0
    batch = lessons_of(target, None, examples=chats)[0].batch
    rows = sorted(int((row != 0).any(-1).sum()) for row in batch.last)
    assert rows == [6, 9]


def test_packed_chats_are_found_one_by_one(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, target)
    packed = pack(CHATS, 60)
    online = lessons_of(target, None, examples=packed)
    wanted = [online[index].batch for index in range(len(online))]
    forbid(target, monkeypatch)
    stored = lessons_of(target, store_of(tmp_path, target), examples=packed)
    for index, batch in enumerate(wanted):
        found = stored[index].batch
        assert torch.equal(found.document, batch.document)
        # computed in another batch: equal to rounding
        torch.testing.assert_close(found.last, batch.last, atol=0.02, rtol=0.02)
        torch.testing.assert_close(found.taps, batch.taps, atol=0.02, rtol=0.02)


def test_what_a_kill_leaves_is_found_and_the_rest_is_made(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_store, "SHARD_BYTES", 1)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    filled(whole, target)
    lessons = lessons_of(target, store_of(killed, target))
    lessons.make(0)  # every chat is a shard of its own here
    (killed / f"half.{1}.part").write_bytes(b"half a shard")
    again = lessons_of(target, store_of(killed, target))
    assert [again.is_stored(index) for index in range(len(again))] == [True] + [False] * (
        len(again) - 1
    )
    filled(killed, target)
    names = [sorted(f.name for f in folder.glob("*.safetensors")) for folder in (whole, killed)]
    assert names[0] == names[1]
    assert len(names[0]) == len(CHATS)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_the_store_as_if_it_had_not(
    tmp_path: Path, target: Target
) -> None:
    """The straight run computes its features in every pass; the broken one reads what it kept."""

    def trained(folder: str, steps: int, store: FeatureStore | None, **more: object) -> Trainer:
        settings = settings_of(tmp_path / folder, save_times=4, **more)
        trainer = trainer_of(target, settings)
        trainer.run = replace(trainer.run, lessons=lessons_of(target, store, Features(last=True)))
        trainer.source.lessons = trainer.run.lessons
        if steps < 8:
            stop_after(trainer, steps)
        trainer.train()
        return trainer

    straight = trained("a", 8, None)
    trained("b", 3, store_of(tmp_path / "features", target, ()))
    again = trained("b", 8, store_of(tmp_path / "features", target, ()), resume=True)
    assert again.progress.step == 8
    assert again.run.lessons.missing_bytes == 0
    for key, value in weights(straight.drafter).items():
        assert torch.equal(value, weights(again.drafter)[key]), key


def test_another_process_s_shards_are_seen(tmp_path: Path, target: Target) -> None:
    early = store_of(tmp_path, target)
    filled(tmp_path, target)
    assert all(early.get(chat) is not None for chat in documents(CHATS))


def test_a_drafter_that_reads_fewer_layers_is_served(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    lessons = lessons_of(target, store_of(tmp_path, target, (1, 3, 5)), Features((1, 5)))
    wanted = lessons_of(target, None, Features((1, 5)))[0].batch.taps
    assert torch.equal(lessons[0].batch.taps, wanted)  # type: ignore[arg-type]
    lessons.flush()
    forbid(target, monkeypatch)
    for features, taps in ((Features((1, 5)), wanted), (Features((), last=True), None)):
        lesson = lessons_of(target, store_of(tmp_path, target, features.layers), features)[0]
        assert (lesson.batch.taps is None) == (taps is None)
        assert taps is None or torch.equal(lesson.batch.taps, taps)  # type: ignore[arg-type]


def test_other_features_are_refused(tmp_path: Path, target: Target) -> None:
    filled(tmp_path, target)
    with pytest.raises(UserError, match=r"of another target \(tiny-llama\): weights is"):
        store_of(tmp_path, tiny_target(num_hidden_layers=7, seed=1))
    with pytest.raises(UserError, match="dtype bfloat16, asked for is float32"):
        store_of(tmp_path, target, dtype="float32")
    with pytest.raises(UserError, match=r"keeps layers \[1, 3\], but \[5\] are read too"):
        store_of(tmp_path, target, (1, 5))
    about = tmp_path / ABOUT
    about.write_text(json.dumps(json.loads(about.read_text()) | {"schema_version": 9}))
    with pytest.raises(UserError, match="schema_version 9, this code reads 1"):
        store_of(tmp_path, target)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    with pytest.raises(UserError, match="holds something else"):
        store_of(tmp_path / "mine", target)


def test_a_foreign_shard_is_named(tmp_path: Path, target: Target) -> None:
    filled(tmp_path, target)
    (tmp_path / "x.safetensors").write_bytes(b"not one")
    with pytest.raises(UserError, match=r"x\.safetensors: not a shard of features"):
        store_of(tmp_path, target)


def test_a_full_disk_is_seen_before_the_work(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path / "a" / "b", target)

    def usage(place: Path) -> object:
        assert place == tmp_path  # the nearest folder that exists
        return type("Usage", (), {"free": 2**30})()

    monkeypatch.setattr(feature_store.shutil, "disk_usage", usage)
    store.check_room(2**30)
    with pytest.raises(UserError, match=r"need 3\.00 GiB and 1\.00 GiB of the disk are free"):
        store.check_room(3 * 2**30)


def test_a_store_is_bfloat16_unless_told(tmp_path: Path) -> None:
    assert FeatureSettings().stored_dtype == "float32"
    assert FeatureSettings(store="x").stored_dtype == "bfloat16"
    assert FeatureSettings(store="x", dtype="float32").stored_dtype == "float32"

"""Saving over an older save: what a kill leaves is the old drafter or the new one, whole."""

import os
from pathlib import Path

import pytest
import torch

from drafters import whole
from drafters.base import NeuralDrafter
from drafters.checkpoint import CONFIG, WEIGHTS, load_drafter, save_drafter
from drafters.errors import UserError
from drafters.registry import build_drafter
from drafters.stored import StoredDrafter
from drafters.target import Target
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def drafter_of(target: Target, heads: int) -> NeuralDrafter:
    drafter = build_drafter("medusa", {"heads": heads}, target.shape)
    assert isinstance(drafter, NeuralDrafter)
    return drafter


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("exchanged", [False, True])
def test_a_stop_at_the_exchange(
    target: Target, heads: int, exchanged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = drafter_of(target, 2), drafter_of(target, heads)
    folder = save_drafter(old, tmp_path / "d", target, {"step": 1})
    real = whole._exchange

    def exchange(fresh: Path, place: Path) -> bool:
        if exchanged:
            real(fresh, place)
        raise KeyboardInterrupt

    monkeypatch.setattr(whole, "_exchange", exchange)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(new, folder, target, {"step": 2})
    monkeypatch.undo()
    found = load_drafter(folder, target)
    assert isinstance(found, NeuralDrafter)
    for name, tensor in (old, new)[exchanged].state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    assert f'"step": {1 + exchanged}' in (folder / CONFIG).read_text()
    assert list(tmp_path.iterdir()) == [folder]
    save_drafter(new, folder, target)
    assert load_drafter(folder, target).options() == new.options()


@pytest.mark.parametrize("folder", [False, True])
def test_a_pipe_or_a_device_is_never_replaced(folder: bool, tmp_path: Path) -> None:
    """As root, renaming over /dev/null would take it from everybody."""
    place = tmp_path / "pipe"
    os.mkfifo(place)
    with pytest.raises(UserError, match="is a device or a pipe: give another place"):
        whole.check_place(place, folder=folder)
    write = whole.whole_folder if folder else whole.whole_file
    with pytest.raises(UserError, match="is a device or a pipe"), write(place):
        pass
    assert place.is_fifo()
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


def test_a_stop_in_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before is gone from beside the new folder, and the stop is obeyed."""
    place, real = tmp_path / "d", os.unlink

    def written(text: str) -> None:
        with whole.whole_folder(place) as new:
            (new / "a").write_text(text)

    def stopped(*_given: object, **_named: object) -> None:
        monkeypatch.setattr(os, "unlink", real)
        raise KeyboardInterrupt

    written("old")
    monkeypatch.setattr(os, "unlink", stopped)
    with pytest.raises(KeyboardInterrupt):
        written("new")
    assert [file.name for file in tmp_path.iterdir()] == ["d"]
    assert (place / "a").read_text() == "new"


def test_without_exchange_files_are_replaced_one_by_one(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "_exchange", lambda *_: False)
    folder = save_drafter(drafter_of(target, 2), tmp_path / "d", target)
    (folder / "stale.txt").write_text("")
    save_drafter(drafter_of(target, 3), folder, target)
    assert {file.name for file in folder.iterdir()} == {WEIGHTS, CONFIG}
    assert load_drafter(folder, target).options()["heads"] == 3


def test_what_a_dead_process_left_is_removed(target: Target, tmp_path: Path) -> None:
    (tmp_path / ".d.4194305.part").mkdir()  # above the largest process id
    (tmp_path / ".d.1.part").mkdir()
    (tmp_path / ".d.x.part").mkdir()
    save_drafter(drafter_of(target, 2), tmp_path / "d", target)
    assert {f.name for f in tmp_path.iterdir()} == {"d", ".d.1.part", ".d.x.part"}


def test_a_link_stays_a_link(target: Target, tmp_path: Path) -> None:
    place = save_drafter(drafter_of(target, 2), tmp_path / "place", target)
    link = tmp_path / "link"
    link.symlink_to(place)
    save_drafter(drafter_of(target, 3), link, target)
    assert link.is_symlink()
    assert load_drafter(place, target).options()["heads"] == 3


def test_a_place_that_cannot_be_written(target: Target, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="d cannot be written"):
        save_drafter(drafter_of(target, 2), tmp_path / "file" / "d", target)


def test_of_a_runs_folder_the_best_is_named(target: Target, tmp_path: Path) -> None:
    best = save_drafter(drafter_of(target, 2), tmp_path / "run" / "best", target)
    with pytest.raises(UserError, match=rf"holds no config.json: give {best}$"):
        load_drafter(tmp_path / "run", target)


def test_a_folder_without_a_drafter_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=r"holds no config.json: give a drafter's folder"):
            StoredDrafter.read(folder)

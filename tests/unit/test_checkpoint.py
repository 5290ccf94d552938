"""Saving over an older save: what a kill leaves is the old drafter, the new one, or refused."""

from pathlib import Path

import pytest
import torch

from drafters.base import NeuralDrafter
from drafters.checkpoint import CONFIG, WEIGHTS, load_drafter, save_drafter
from drafters.errors import UserError
from drafters.registry import build_drafter
from drafters.target import Target
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def drafter_of(target: Target, heads: int) -> NeuralDrafter:
    drafter = build_drafter("medusa", {"heads": heads}, target.shape)
    assert isinstance(drafter, NeuralDrafter)
    return drafter


@pytest.mark.parametrize("renames", [0, 1])
@pytest.mark.parametrize("heads", [2, 3])
def test_a_kill_between_two_renames(
    target: Target, renames: int, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run's options stay the same; those of another never meet weights they do not fit."""
    old, new = drafter_of(target, 2), drafter_of(target, heads)
    folder = save_drafter(old, tmp_path / "d", target)
    real, done = Path.replace, []

    def replace(self: Path, to: Path) -> Path:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(to.name)
        return real(self, to)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(new, folder, target)
    assert done == [WEIGHTS][:renames]
    monkeypatch.undo()
    if renames and heads != 2:
        with pytest.raises(UserError, match="unused tensors"):
            load_drafter(folder, target)
    else:
        found = load_drafter(folder, target)
        assert isinstance(found, NeuralDrafter)
        for name, tensor in (old, new)[renames].state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor)
    save_drafter(new, folder, target)
    assert {file.name for file in folder.iterdir()} == {WEIGHTS, CONFIG}
    assert load_drafter(folder, target).options() == new.options()

"""Saving over an older save: a kill at any moment leaves the old drafter or the new one."""

from pathlib import Path

import pytest
import torch

from drafters.base import NeuralDrafter
from drafters.checkpoint import CONFIG, WEIGHTS, load_drafter, save_drafter
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
def test_a_kill_between_two_renames(
    target: Target, renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and training notes differ: weights of one save never meet the config of another."""
    old, new = drafter_of(target, 2), drafter_of(target, 3)
    folder = save_drafter(old, tmp_path / "d", target, {"loss": float("nan")})
    assert load_drafter(folder, target).options() == old.options()
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
    if renames:
        with pytest.warns(UserWarning, match=r"config\.json is not what model\.safetensors was"):
            found = load_drafter(folder, target)
    else:
        found = load_drafter(folder, target)
    expected = (old, new)[renames]
    assert found.options() == expected.options()
    assert isinstance(found, NeuralDrafter)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    save_drafter(new, folder, target)
    assert {file.name for file in folder.iterdir()} == {WEIGHTS, CONFIG}
    assert load_drafter(folder, target).options() == new.options()

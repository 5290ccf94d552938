"""What ships is found by the target it was made for, and by no other."""

from pathlib import Path

from drafters.checkpoint import save_drafter
from drafters.methods.medusa import MedusaDrafter
from drafters.settings import configs_dir
from drafters.shipped import shipped_for
from drafters.stored import WEIGHTS, StoredDrafter
from tests.neural import away
from tests.tiny import tiny_target


def test_a_shipped_drafter_is_found_for_its_own_target_only(tmp_path: Path) -> None:
    own, other = tiny_target(), tiny_target(num_hidden_layers=3)
    assert shipped_for(own, tmp_path) is None
    folder = save_drafter(away(MedusaDrafter, own, 0.0), tmp_path / "heads", own)
    assert shipped_for(own, tmp_path) == folder
    assert shipped_for(other, tmp_path) is None


def test_what_ships_is_whole_and_small() -> None:
    folders = sorted(path for path in (configs_dir() / "shipped").iterdir() if path.is_dir())
    assert folders
    for folder in folders:
        stored = StoredDrafter.read(folder)
        assert stored.faults() == []
        assert (folder / WEIGHTS).stat().st_size < 12e6
        assert "/" not in stored.made_for.name

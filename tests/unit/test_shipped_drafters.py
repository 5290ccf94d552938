"""What ships is found by the target it was made for, and by no other."""

from pathlib import Path

from drafters.checkpoint import save_drafter
from drafters.methods.medusa import MedusaDrafter
from drafters.shipped import shipped_for
from tests.neural import away
from tests.tiny import tiny_target


def test_a_shipped_drafter_is_found_for_its_own_target_only(tmp_path: Path) -> None:
    own, other = tiny_target(), tiny_target(num_hidden_layers=3)
    assert shipped_for(own, tmp_path) is None
    folder = save_drafter(away(MedusaDrafter, own, 0.0), tmp_path / "heads", own)
    assert shipped_for(own, tmp_path) == folder
    assert shipped_for(other, tmp_path) is None

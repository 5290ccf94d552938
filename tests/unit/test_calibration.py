"""Sequential temperature scaling: survival is told right, from left to right."""

import pytest
import torch

from drafters.base import NeuralDrafter
from drafters.calibration import calibration_error, sequential_temperatures
from drafters.losses import LossSettings
from drafters.registry import build_drafter
from tests.tiny import tiny_target
from tests.unit.test_objective import examples_of, lessons_of
from training.calibrate import calibrate
from training.objective import Objective


def test_errors_of_bins_do_not_cancel() -> None:
    stated = torch.tensor([0.95, 0.95, 0.15, 0.15])
    taken = torch.tensor([1.0, 0.5, 0.5, 0.0])
    assert float(calibration_error(stated, taken)) == pytest.approx((0.2 + 0.1) / 2)


def test_temperatures_are_found_depth_by_depth() -> None:
    """Confidence that is twice too sure at depth 1, right at 2, half as sure as it may at 3."""
    torch.manual_seed(0)
    true = 2 * torch.randn(4000, 3)
    temperatures = torch.tensor([2.0, 1.0, 0.5])
    found = sequential_temperatures(true * temperatures, true.sigmoid())
    assert found.log2().sub(temperatures.log2()).abs().max() < 0.26
    drawn = (torch.rand(true.shape) < true.sigmoid()).float()
    again = sequential_temperatures(true * temperatures, drawn)
    assert again.log2().sub(temperatures.log2()).abs().max() < 0.51


def test_what_is_right_stays() -> None:
    true = torch.linspace(-3, 3, 200)[:, None].expand(-1, 2)
    assert sequential_temperatures(true, true.sigmoid()).tolist() == [1.0, 1.0]


def test_a_drafter_is_calibrated_on_held_out_chats() -> None:
    target = tiny_target(num_hidden_layers=3, hidden_size=32, intermediate_size=64)
    for name in ("dspark", "dflash"):
        torch.manual_seed(0)
        options = {"taps": [0, 1], "slots": 2, "draft_vocab_size": 32}
        drafter = build_drafter(name, options, target.shape)
        assert isinstance(drafter, NeuralDrafter)
        drafter.init_from(target)
        objective = Objective(drafter.eval(), target, LossSettings())
        if name == "dspark":
            with torch.no_grad():
                drafter.get_parameter("correction.sure.bias").fill_(-1.0)
        calibrate(objective, lessons_of(examples_of(20, 14), target, drafter.features))
        if name == "dspark":
            temperature = drafter.get_buffer("correction.temperature")
            assert temperature.shape == (2,)
            assert bool((temperature != 1).any())

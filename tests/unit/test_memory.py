"""Memory of a whole training step: linear in the length, and in the steps of the unrolled test."""

import itertools
import math

import pytest
import torch

from drafters.losses import LossSettings
from drafters.target import Target
from tests.tiny import tiny_target
from tests.unit.test_objective import drafter_of, examples_of, lessons_of
from training.memory import LiveTensors, step_memory
from training.objective import Objective

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=7, initializer_range=0.2, max_position_embeddings=1024)


def test_live_tensors_are_counted_once_and_forgotten() -> None:
    before = torch.ones(100)
    with LiveTensors() as counted:
        view = before.view(10, 10)
        made = view + 1
        other = made.t()
        assert counted.live == 400
        del made
        assert counted.live == 400  # a view holds it
        del other
        assert counted.live == 0
        (view * torch.ones(10, 1)).sum().clone()
    assert counted.peak == 440
    assert counted.largest == (10, 10)


@pytest.mark.parametrize("unroll", [1, 3, 7])
def test_a_step_s_memory_is_linear_in_the_length(target: Target, unroll: int) -> None:
    """No matrix [T, T] or [T, T + steps]: the largest tensor has T rows and fixed columns."""
    drafter = drafter_of(target, "eagle", unroll=unroll)
    objective = Objective(drafter, target, LossSettings())
    peaks = []
    for length in (128, 256, 512, 1024):
        lessons = lessons_of(examples_of(length), target, drafter.features)
        counted = step_memory(objective, lessons[0])
        peaks.append(counted.peak)
        if length == 1024:
            assert math.prod(counted.largest) < length * length / 2, counted.largest
    first, second, third = (b - a for a, b in itertools.pairwise(peaks))
    assert second == pytest.approx(2 * first, rel=0.1)
    assert third == pytest.approx(4 * first, rel=0.1)


def test_a50_every_further_step_takes_the_same(target: Target) -> None:
    """Case A50: nothing is copied once a step of what all steps share."""
    peaks = []
    for unroll in (1, 3, 5, 7):
        drafter = drafter_of(target, "eagle", unroll=unroll)
        lessons = lessons_of(examples_of(256), target, drafter.features)
        peaks.append(step_memory(Objective(drafter, target, LossSettings()), lessons[0]).peak)
    first, second, third = (b - a for a, b in itertools.pairwise(peaks))
    assert third == pytest.approx(second, rel=0.2)
    assert first == pytest.approx(second, rel=0.5)

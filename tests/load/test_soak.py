"""Seconds of load: every row is what it is alone, no token is lost, memory stays."""

import pytest
import torch

from drafters.growth import Chain
from drafters.registry import build_drafter
from drafters.sampling import Warp
from tests.load.long import PROMPT, answers
from tests.load.soak import Load, Served, soak
from tests.load.ties import excused, near, strays
from tests.tiny import tiny_target


def load_of(temperature: float) -> Load:
    target = tiny_target(num_hidden_layers=2, hidden_size=32, intermediate_size=64)
    drafter = build_drafter("ngram", {}, target.shape)
    return Load(target, drafter, Chain(3), Warp(temperature))


@pytest.mark.slow
def test_rows_under_load() -> None:
    load = load_of(0.7)
    done = soak(load, rows=16, seconds=6, sample=60)
    assert done.requests > 20
    assert all(excused(load, one, load.alone(one.request)) for one in done.sample)
    assert (done.lost, done.short) == (0, 0)
    assert done.grown < 16 * 2**20


@pytest.mark.slow
def test_a_long_answer_stays_in_its_cache() -> None:
    load = load_of(0)
    drafted, plain = answers(load, [load.drafter, build_drafter("none", {}, load.target.shape)], 90)
    assert drafted.ids == plain.ids
    assert strays(load.target, [*PROMPT, *plain.ids], len(PROMPT)) == 0
    assert drafted.cache == drafted.reserved
    assert len(plain.ids) == plain.rounds + 1 == 90


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_a_wrong_row_is_not_excused(temperature: float) -> None:
    load = load_of(temperature)
    served = Served(5, [1, 2, 3], [0] * 8)
    right = load.alone(served.request)
    assert excused(load, Served(5, [1, 2, 3], right), right)
    wrong = [*right[:4], (right[4] + 1) % 128, *right[5:]]
    assert not excused(load, Served(5, [1, 2, 3], wrong), right)
    assert not excused(load, Served(5, [1, 2, 3], right[:5]), right)


def test_a_coin_at_the_border_of_two_tokens_draws_either() -> None:
    ends = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)
    assert [near(ends, token, 0.50002, 1e-4) for token in range(3)] == [False, True, True]
    assert [near(ends, token, 0.50003, 1e-4) for token in range(3)] == [False, False, True]

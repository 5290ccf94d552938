"""Ten seconds of load: every row is what it is alone, no token is lost, memory stays."""

import pytest

from drafters.growth import Chain
from drafters.registry import build_drafter
from drafters.sampling import Warp
from tests.load.soak import Load, soak
from tests.tiny import tiny_target


@pytest.mark.slow
def test_rows_under_load() -> None:
    target = tiny_target(num_hidden_layers=2, hidden_size=32, intermediate_size=64)
    load = Load(target, build_drafter("ngram", {}, target.shape), Chain(3), Warp(0.7))
    done, numbers = soak(load, rows=16, seconds=8)
    assert len(numbers) > 20
    for request, number, output in list(zip(done.requests, numbers, done.outputs, strict=True))[
        :60
    ]:
        assert output == load.alone(request, number)
        assert len(output) == request.max_new_tokens
    assert done.committed == sum(map(len, done.outputs)) + done.released
    assert done.memory[-1] - done.memory[len(done.memory) // 2] < 16 * 2**20

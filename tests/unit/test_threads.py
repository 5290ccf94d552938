"""Threads that share one target and one drafter: each decodes what it decodes alone."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from drafters.growth import Chain
from drafters.target import Target
from inference import generate
from inference.generate import Output
from tests.tiny import prompts_of, tiny_target
from tests.unit.test_every_drafter import make

TEXTS = [prompts_of(5, 9, seed=seed) for seed in range(12)]


@pytest.fixture(scope="module", params=["fast", "reference", "static"])
def target(request: pytest.FixtureRequest) -> Target:
    return tiny_target(engine=request.param, num_hidden_layers=3)


@pytest.mark.parametrize("name", ["eagle", "medusa", "draft_model"])
def test_threads_do_not_meet(name: str, target: Target) -> None:
    """Taps are read by hooks in the reference forward, which every thread's forward passes."""
    drafter = make(name, target)

    def decode(prompts: list[list[int]]) -> list[Output]:
        return generate(target, drafter, prompts, growth=Chain(3), max_new_tokens=16)

    alone = [decode(prompts) for prompts in TEXTS]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(decode, TEXTS))
    assert together == alone

"""The target drafts over a window of its own cache: what it sees, and what it leaves alone."""

from dataclasses import replace

import pytest
import torch

from drafters.base import Features
from drafters.cache import KVCache
from drafters.errors import UserError
from drafters.frontier import Frontier
from drafters.growth import Chain, Dynamic, Static
from drafters.methods.self_window import SelfWindowGuesser
from drafters.placement import causal_block
from drafters.registry import build_drafter
from drafters.sliding import SlidingCache
from drafters.target import Target
from inference import generate
from tests.tiny import prompts_of, tiny_target

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(**SIZES)


def direct(
    target: Target, cache: KVCache, tokens: list[int], sinks: int, window: int
) -> torch.Tensor:
    """Run tokens in turn over the whole cache of one row, what lies between masked."""
    placement = cache.place([causal_block(len(tokens)), None][:1])
    length = int(cache.lengths[0])
    hidden = torch.ones(1, len(tokens), placement.span, dtype=torch.bool).triu(length + 1)
    hidden[:, :, sinks : max(sinks, length - window)] = True
    placement = replace(placement, hidden=hidden, chain=None, _masks={})
    return target.forward(torch.tensor(tokens), placement, cache, Features())[0]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("length", [3, 7, 18])
def test_a_draft_sees_sinks_window_and_its_own_path(engine: str, family: str, length: int) -> None:
    """Also where a layer's own sliding window is shorter than what is kept."""
    changes = {"sliding_window": 5} if family == "mistral" else {}
    target = tiny_target(family, engine=engine, **SIZES, **changes)
    sinks, window = 2, 6
    cache = target.new_cache(1, 40)
    view = SlidingCache(cache, sinks, window, 8)
    ids = torch.tensor(prompts_of(30)[0])
    done = 0
    for stop in (length, length + 2):  # the ring goes on where it was
        target.prefill([ids[done:stop]], cache, Features())
        done = stop
        view.refresh([0])
        path = ids[stop : stop + 3].tolist()
        expected = direct(target, cache, path, sinks, window)
        guesser = SelfWindowGuesser(target, view, [0], path[:1])
        found = [guesser.root_logits()]
        for depth, token in enumerate(path[1:], start=1):
            frontier = Frontier(
                torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.int64), depth
            )
            found.append(guesser.step(frontier)[:, 0])
        assert torch.allclose(torch.cat(found), expected, atol=1e-5)


def test_nothing_is_written_to_the_targets_cache(target: Target) -> None:
    cache = target.new_cache(2, 24)
    target.prefill([torch.tensor(p) for p in prompts_of(11, 4)], cache, Features())
    before = cache.store.clone()
    view = SlidingCache(cache, 1, 3, 8)
    view.refresh([0, 1])
    growth = Static((2, 2))
    guesser = SelfWindowGuesser(target, view, [0, 1], [5, 6])
    tokens = torch.tensor([[1, 2], [3, 4]])
    guesser.step(Frontier(tokens, torch.zeros_like(tokens), 1))
    assert growth.cells <= 8
    assert torch.equal(cache.store, before)
    assert cache.lengths.tolist() == [11, 4]


def test_a_window_over_everything_is_always_right(target: Target) -> None:
    drafter = build_drafter("self_window", {}, target.shape)
    prompts = prompts_of(9, 3)
    outputs = generate(target, drafter, prompts, growth=Chain(3), max_new_tokens=25)
    assert [out.tau for out in outputs] == [4, 4]
    drawn = Chain(3, "sampled")
    outputs = generate(target, drafter, prompts, growth=drawn, max_new_tokens=25, temperature=0.9)
    assert [out.tau for out in outputs] == [4, 4]


@pytest.mark.filterwarnings("ignore:outputs end at the target's context")
def test_positions_run_out() -> None:
    """Near the end of the context a row goes on without drafts."""
    target = tiny_target(max_position_embeddings=24, **SIZES)
    drafter = build_drafter("self_window", {"window": 4}, target.shape)
    plain = build_drafter("none", {}, target.shape)
    prompts = prompts_of(6, 20)
    outputs = [
        generate(target, d, prompts, growth=Dynamic(4, 2, 3), max_new_tokens=40)
        for d in (drafter, plain)
    ]
    assert [o.ids for o in outputs[0]] == [o.ids for o in outputs[1]]


def test_bad_options(target: Target) -> None:
    with pytest.raises(UserError, match="sinks is 4, window 0: give 0 or more, 1 or more"):
        build_drafter("self_window", {"window": 0}, target.shape)

"""The law that leaves the whole engine (cache, batch, growth), by enumeration over its coins."""

from types import SimpleNamespace

import pytest
import torch

from drafters.growth import Chain, Dynamic, Growth, Static
from drafters.registry import build_drafter
from drafters.sampling import Warp
from drafters.target import Target
from inference.engine import Decoder, Request
from inference.stop import Stop
from tests.exact import WalkingCoin, exact_law
from tests.tiny import tiny_target

VOCABULARY, NEW = 5, 3
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(seed=1, num_hidden_layers=2, initializer_range=0.2, **SIZES)


def plain_law(target: Target, prompt: list[int], warp: Warp) -> dict[tuple[int, ...], float]:
    """Sum the chain rule over the model's own forward, without cache or engine."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NEW):
        longer = {}
        for tokens, probability in law.items():
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *tokens]])
                logits = target.model(input_ids=ids).logits[0, -1:]
            probs = warp.laws(logits).probs[0].double()
            for token in range(VOCABULARY):
                longer[*tokens, token] = probability * float(probs[token])
        law = longer
    return {k: v for k, v in law.items() if v > 0}


def engine_law(
    target: Target, name: str, growth: Growth, prompt: list[int], warp: Warp
) -> dict[tuple[int, ...], float]:
    torch.manual_seed(3)
    drafter = drafter_of(name, target)

    def procedure(coin: WalkingCoin) -> tuple[int, ...]:
        decoder = Decoder(target, drafter, growth, rows=1, capacity=16, warp=warp, stop=Stop())
        random = SimpleNamespace(draft=coin, verify=coin)
        decoder.admit({0: Request(prompt, NEW, random)})
        while decoder.running:
            decoder.round()
        row = decoder.rows[0]
        assert row is not None
        return tuple(row.ids[len(prompt) :])

    return exact_law(procedure)


OPTIONS: dict[str, dict[str, object]] = {
    "eagle": {"draft_vocab_size": 4, "taps": [0, 1]},
    "medusa": {"draft_vocab_size": 4, "heads": 3},
}


def drafter_of(name: str, target: Target):
    drafter = build_drafter(name, OPTIONS.get(name, {}), target.shape)
    if isinstance(drafter, torch.nn.Module):
        drafter.eval()
    return drafter


GROWTHS: dict[str, list[Growth]] = {
    "none": [Chain(1)],
    "ngram": [Chain(2)],
}


@pytest.mark.parametrize(
    ("name", "growth"), [(name, growth) for name, all_ in GROWTHS.items() for growth in all_]
)
def test_engine_emits_the_target_law(target: Target, name: str, growth: Growth) -> None:
    warp, prompt = Warp(temperature=1.0), [1, 2, 3, 1, 2]
    expected = plain_law(target, prompt, warp)
    law = engine_law(target, name, growth, prompt, warp)
    assert law.keys() == expected.keys()
    for tokens, probability in expected.items():
        assert law[tokens] == pytest.approx(probability, abs=1e-5)


def test_truncated_laws(target: Target) -> None:
    """Top-k, top-p and min-p under speculation."""
    for warp in (Warp(1.0, top_k=3), Warp(0.7, top_p=0.8), Warp(1.5, min_p=0.2)):
        expected = plain_law(target, [4, 0, 4], warp)
        law = engine_law(target, "ngram", Chain(2), [4, 0, 4], warp)
        assert law.keys() == expected.keys()
        assert max(abs(law[k] - v) for k, v in expected.items()) < 1e-5

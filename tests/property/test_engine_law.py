"""The law that leaves the whole engine (cache, batch, growth), by enumeration over its coins."""

from types import SimpleNamespace

import pytest
import torch

from drafters.base import Drafter
from drafters.growth import BestFirst, Chain, CostAware, Dynamic, Growth, Prices, Static
from drafters.growth.base import FixedShape
from drafters.registry import build_drafter
from drafters.rules import Context, Rules
from drafters.sampling import Warp
from drafters.target import Target
from drafters.tree import TokenTree
from inference.engine import Decoder, Request
from inference.stop import Stop
from tests.exact import WalkingCoin, exact_law
from tests.tiny import tiny_target

SIZES = {"hidden_size": 16, "intermediate_size": 32, "initializer_range": 0.2}


def small(vocabulary: int, seed: int = 1, layers: int = 2) -> Target:
    return tiny_target(seed=seed, vocab_size=vocabulary, num_hidden_layers=layers, **SIZES)


@pytest.fixture(scope="module")
def target() -> Target:
    return small(4)


def plain_law(
    target: Target, prompt: list[int], warp: Warp, new: int
) -> dict[tuple[int, ...], float]:
    """Sum the chain rule over the model's own forward, without cache or engine."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(new):
        longer = {}
        texts = torch.tensor([[*prompt, *tokens] for tokens in law])
        with torch.no_grad():
            last = target.model(input_ids=texts).logits[:, -1]
        for (tokens, probability), ids, row in zip(law.items(), texts, last, strict=True):
            logits = row[None]
            if warp.rules is not None:
                context = Context(ids.tolist(), len(prompt), frozenset())
                logits = warp.rules.over(TokenTree.chain(ids[-1:]), logits, context)
            probs = warp.laws(logits).probs[0].double()
            for token in range(target.shape.vocab_size):
                longer[*tokens, token] = probability * float(probs[token])
        law = longer
    return {k: v for k, v in law.items() if v > 0}


def engine_law(
    target: Target,
    drafter: Drafter,
    growth: Growth,
    prompt: list[int],
    warp: Warp,
    new: int,
    verify: str | None,
) -> dict[tuple[int, ...], float]:
    """Sum the law over all outcomes; where nothing is learned, in a row that is used again."""

    def made() -> Decoder:
        return Decoder(
            target, drafter, growth, rows=1, capacity=16, warp=warp, stop=Stop(), verify=verify
        )

    learns = not (isinstance(growth, FixedShape) and isinstance(drafter, torch.nn.Module))
    used = None if learns else made()

    def procedure(coin: WalkingCoin) -> tuple[int, ...]:
        decoder = used or made()
        random = SimpleNamespace(draft=coin, verify=coin)
        decoder.admit({0: Request(prompt, new, random)})
        while decoder.running:
            decoder.round()
        row = decoder.rows[0]
        assert row is not None
        decoder.release(0)
        return tuple(row.ids[len(prompt) :])

    return exact_law(procedure)


def drafter_of(name: str, target: Target, kept: int) -> Drafter:
    """Make an untrained drafter whose head keeps fewer ids than the target has."""
    torch.manual_seed(3)
    options: dict[str, object] = {
        "dflash": {"draft_vocab_size": kept, "taps": [0, 1], "slots": 2, "layers": 1},
        "dflash2": {"draft_vocab_size": kept, "taps": [0, 1], "slots": 2, "candidates": 2},
        "dspark": {"draft_vocab_size": kept, "taps": [0, 1], "slots": 2, "layers": 1},
        "eagle": {"draft_vocab_size": kept, "taps": [0, 1]},
        "eagle1": {"draft_vocab_size": kept},
        "peagle": {"draft_vocab_size": kept, "taps": [0, 1], "layers": 1},
        "hydra": {"draft_vocab_size": kept, "heads": 3},
        "medusa": {"draft_vocab_size": kept, "heads": 3},
        "mtp": {"draft_vocab_size": kept, "modules": 2},
        "self_window": {"sinks": 1, "window": 2},
        "draft_model": {"model": small(target.shape.vocab_size, seed=2, layers=1)},
    }.get(name, {})
    if name == "hybrid":
        options = {"members": ["ngram", drafter_of("medusa", target, kept)]}
    drafter = build_drafter(name, options, target.shape)
    return drafter.eval() if isinstance(drafter, torch.nn.Module) else drafter


def check(
    target: Target,
    drafter: Drafter,
    growth: Growth,
    warp: Warp,
    new: int,
    verify: str | None = None,
) -> None:
    """Compare the engine's law of `new` tokens with the chain rule's."""
    prompt = [token % target.shape.vocab_size for token in (1, 2, 0, 1, 2)]
    expected = plain_law(target, prompt, warp, new)
    law = engine_law(target, drafter, growth, prompt, warp, new, verify)
    assert law.keys() == expected.keys()
    assert max(abs(law[tokens] - value) for tokens, value in expected.items()) < 1e-5


# what pays differs from node to node: some rounds draft nothing, some a tree
PRICES = Prices(((1, 1.0), (2, 1.1), (4, 1.5)), first=0.05, level=0.05)

FIXED = [
    ("none", Chain(1)),
    ("ngram", Chain(2)),
    ("medusa", Chain(2)),
    pytest.param("medusa", Static((2, 1)), marks=pytest.mark.slow),
    ("medusa", BestFirst(3, 2)),
    ("dspark", BestFirst(3, 2)),
    ("hydra", Dynamic(3, 2, 2)),
    ("eagle1", Dynamic(3, 2, 2)),
    ("peagle", Dynamic(3, 2, 2)),
    pytest.param("medusa", Static(tree=((0,), (1,), (1, 0))), marks=pytest.mark.slow),
    pytest.param("eagle", Chain(2), marks=pytest.mark.slow),
    ("eagle", Dynamic(3, 2, 2)),
    ("mtp", Dynamic(3, 2, 2)),
    ("draft_model", Dynamic(4, 2, 2)),
    ("ngram", CostAware(2, 1, 2).priced(PRICES)),
    ("medusa", CostAware(3, 2, 2).priced(PRICES)),
    pytest.param("eagle", CostAware(3, 2, 2).priced(PRICES), marks=pytest.mark.slow),
    pytest.param("dspark", CostAware(3, 2, 2).priced(PRICES), marks=pytest.mark.slow),
    ("suffix", Dynamic(3, 2, 2)),
    ("lookahead", Static((2, 1))),
    ("self_window", Chain(2)),
    ("hybrid", Chain(2)),
    ("hybrid", Dynamic(3, 2, 2)),
    ("hybrid", CostAware(3, 2, 2).priced(PRICES)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "growth"), FIXED)
def test_fixed_drafts_emit_the_target_law(target: Target, name: str, growth: Growth) -> None:
    check(target, drafter_of(name, target, kept=3), growth, Warp(1.0), new=3)


@pytest.mark.parametrize("warp", [Warp(1.0, top_k=2), Warp(0.7, top_p=0.8), Warp(1.5, min_p=0.2)])
def test_truncated_laws(target: Target, warp: Warp) -> None:
    check(target, drafter_of("ngram", target, kept=3), Chain(2), warp, new=3)


RULES = Rules(
    {(2, 1): 1.5},
    repetition_penalty=1.4,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    bad_words=[[0, 2]],
    allowed=lambda ids: [token for token in range(4) if token != ids[-1]],
)


@pytest.mark.parametrize(
    ("name", "growth"), [("ngram", Chain(2)), ("medusa", Static((2, 1)))], ids=str
)
def test_ruled_laws(target: Target, name: str, growth: Growth) -> None:
    check(target, drafter_of(name, target, kept=3), growth, Warp(0.9, rules=RULES), new=3)


@pytest.mark.slow
def test_a_ruled_block() -> None:
    target = small(2)
    warp = Warp(1.0, rules=Rules(repetition_penalty=1.4, frequency_penalty=0.5))
    check(target, drafter_of("medusa", target, kept=2), Chain(2, "sampled"), warp, new=4)


def test_a_drawn_chain_emits_the_target_law() -> None:
    """What is drawn multiplies the outcomes, so these walk smaller vocabularies."""
    target = small(3)
    check(target, drafter_of("eagle", target, kept=2), Chain(1, "sampled"), Warp(1.0), new=3)


@pytest.mark.slow
def test_a_drawn_chain_that_stops_where_nothing_pays() -> None:
    target = small(3)
    growth = CostAware(2, 1, 2, "sampled").priced(PRICES)
    check(target, drafter_of("medusa", target, kept=2), growth, Warp(1.0), new=3)


@pytest.mark.slow
@pytest.mark.parametrize("growth", [Chain(1, "sampled"), Static((2,), "sampled")], ids=str)
def test_drawn_beside_copied(growth: Growth) -> None:
    """Members that draw and members that copy in one tree, cut to one budget."""
    target = small(3)
    check(target, drafter_of("hybrid", target, kept=2), growth, Warp(1.0), new=3)


@pytest.mark.parametrize(
    ("growth", "verify"),
    [
        (Chain(2, "sampled"), "block"),
        pytest.param(Static((2, 1), "sampled"), "traversal", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_levels_judged_together(growth: Growth, verify: str) -> None:
    """The first token is the prefill's, the last one the bonus."""
    target = small(2)
    check(target, drafter_of("medusa", target, kept=2), growth, Warp(1.0), 4, verify)


@pytest.mark.slow
def test_two_levels_drawn_beside_copied() -> None:
    """Merged chains branch: the default verifier of chains judges them as trees."""
    target = small(2)
    check(target, drafter_of("hybrid", target, kept=2), Chain(2, "sampled"), Warp(1.0), 4, "block")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "growth", "verify"),
    [
        ("eagle", CostAware(2, 1, 2, "sampled").priced(PRICES), "lossless"),
        ("medusa", Chain(2, "sampled"), "block"),
        ("medusa", Chain(2, "sampled"), "lossless"),
        ("medusa", Static((2,), "sampled"), "lossless"),
        ("medusa", Static((2,), "sampled"), "traversal"),
        ("dspark", Chain(2, "sampled"), "block"),
        ("dspark", CostAware(2, 1, 2, "sampled").priced(PRICES), "lossless"),
        ("dflash", Static((2,), "sampled"), "lossless"),
        ("dflash2", Chain(2, "sampled"), "lossless"),
        ("hydra", Chain(2, "sampled"), "lossless"),
        ("eagle1", Static((2,), "sampled"), "lossless"),
        ("peagle", Chain(2, "sampled"), "block"),
        ("eagle", Chain(2, "sampled"), "block"),
        ("mtp", Chain(2, "sampled"), "lossless"),
        ("eagle", Static((2,), "sampled"), "traversal"),
        ("draft_model", Static((2,), "sampled"), "lossless"),
        ("hybrid", Static((2,), "sampled"), "traversal"),
        ("hybrid", CostAware(2, 1, 2, "sampled").priced(PRICES), "lossless"),
    ],
    ids=str,
)
def test_drawn_drafts_emit_the_target_law(name: str, growth: Growth, verify: str) -> None:
    target = small(3)
    drafter = drafter_of(name, target, kept=2)
    check(target, drafter, growth, Warp(1.0), 1 + 1 + growth.depth, verify)

"""A12: positions move with the cache. A13: a pause loses nothing. A14: a window below the text."""

from collections.abc import Sequence

import pytest
import torch

from drafters.base import Commit, Drafter, DraftSession, Features
from drafters.growth import Chain, Growth
from drafters.registry import build_drafter
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from drafters.tree import TokenTree
from inference import generate
from inference.engine import Decoder, Request
from inference.stop import Stop
from tests.tiny import prompts_of, tiny_target


def hf_greedy(target: Target, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new
    )
    return out[0, len(prompt) :].tolist()


def itself(target: Target) -> Drafter:
    return build_drafter("draft_model", {"model": target}, target.shape)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [[10], *prompts_of(2, 40)], ids=len)
def test_a12_the_cache_holds_what_is_committed_but_the_root(prompt: list[int]) -> None:
    target = tiny_target(num_hidden_layers=2)
    small = tiny_target(seed=9, num_hidden_layers=1)  # nearly all it drafts is refused
    decoder = Decoder(
        target,
        build_drafter("draft_model", {"model": small}, target.shape),
        Chain(5),
        rows=1,
        capacity=len(prompt) + 64,
        warp=Warp(),
        stop=Stop(),
    )
    decoder.admit({0: Request(prompt, 64, RowRandom(0))})
    row = decoder.rows[0]
    assert row is not None
    while decoder.running:
        decoder.round()
        assert decoder.cache.lengths.tolist() == [len(row.ids) - 1]
    assert row.ids[len(prompt) :] == hf_greedy(target, prompt, 64)


class Pausing:
    """A drafter that is not asked in some rounds."""

    name = "pausing"

    def __init__(self, drafter: Drafter, script: Sequence[bool]) -> None:
        self.drafter, self.script, self.features = drafter, script, drafter.features

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "PausingSession":
        return PausingSession(self.drafter.start(target, growth, rows, capacity), self.script)


class PausingSession:
    def __init__(self, session: DraftSession, script: Sequence[bool]) -> None:
        self.session, self.script = session, iter(script)
        self.features: Features = session.features
        self.roots: list[int] = []

    def observe(self, commits: Sequence[Commit | None]) -> None:
        self.roots = [commit.root for commit in commits if commit is not None]
        self.session.observe(commits)

    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        if next(self.script):
            return self.session.propose(warp, random)
        return [TokenTree.chain([root]) for root in self.roots]


def test_a13_all_is_accepted_after_a_pause() -> None:
    target = tiny_target()
    prompts = prompts_of(7, 3)
    pausing = Pausing(itself(target), [True, False, False, True, True])
    outputs = generate(target, pausing, prompts, growth=Chain(3), max_new_tokens=1 + 14)
    assert [output.accepted for output in outputs] == [[3, 0, 0, 3, 3]] * 2
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.ids == hf_greedy(target, prompt, 15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "attention"), [("fast", "sdpa"), ("reference", "sdpa"), ("reference", "eager")]
)
def test_a14_a_window_shorter_than_the_text(engine: str, attention: str) -> None:
    """As target and as drafter: were the drafter's window wrong, it would not guess all."""
    window = tiny_target(
        "mistral", engine=engine, attention=attention, num_hidden_layers=2, sliding_window=8
    )
    (prompt,) = prompts_of(6)
    new = 1 + 7 * 6  # the prefill's token and seven rounds
    truth = hf_greedy(window, prompt, new)
    (output,) = generate(window, itself(window), [prompt], growth=Chain(5), max_new_tokens=new)
    assert output.ids == truth
    assert output.tau == 6
    full = tiny_target(num_hidden_layers=2)
    (output,) = generate(full, itself(window), [prompt], growth=Chain(5), max_new_tokens=new)
    assert output.ids == hf_greedy(full, prompt, new)

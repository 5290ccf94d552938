"""A causal LM as drafter: its own cache, its own limits, and whose tokens it speaks."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from drafters.base import Commit, DraftSession, Features
from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.growth import Chain, Dynamic, Growth, Static
from drafters.methods.draft_model import DraftModel
from drafters.methods.none import NoDrafter
from drafters.registry import build_drafter
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from drafters.tree import TokenTree
from inference import generate
from tests.folders import save_tiny_target, tiny_tokenizer
from tests.tiny import prompts_of, tiny_model, tiny_target


class Pausing:
    """A drafter that is not asked in some rounds: the root alone stands in for it."""

    name = "pausing"
    features = Features()

    def __init__(self, inner: DraftModel, asks: Sequence[bool]) -> None:
        self.inner, self.asks = inner, list(asks)

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "PausingSession":
        return PausingSession(self.inner.start(target, growth, rows, capacity), self.asks)


class PausingSession:
    features = Features()

    def __init__(self, inner: DraftSession, asks: list[bool]) -> None:
        self.inner, self.asks, self.round = inner, asks, -1
        self.roots: dict[int, int] = {}

    def observe(self, commits: Sequence[Commit | None]) -> None:
        self.inner.observe(commits)
        self.roots |= {row: c.root for row, c in enumerate(commits) if c is not None}

    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        self.round += 1
        if self.asks[self.round % len(self.asks)]:
            return self.inner.propose(warp, random)
        return [
            None if coins is None else TokenTree.chain([self.roots[row]])
            for row, coins in enumerate(random)
        ]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_target_itself_is_always_right(family: str) -> None:
    target = tiny_target(family)
    for growth, tau in ((Chain(3), 4), (Static((1, 2)), 3)):
        outputs = generate(
            target,
            DraftModel(target),
            prompts_of(9, 4, 1),
            growth=growth,
            max_new_tokens=1 + 4 * tau,
        )
        assert [o.tau for o in outputs] == [tau] * 3


def test_a13_rounds_without_a_proposal_lose_nothing() -> None:
    target = tiny_target()
    drafter = Pausing(DraftModel(target), [True, False, False, True])
    outputs = generate(target, drafter, prompts_of(5, 8), growth=Chain(3), max_new_tokens=21)
    for output in outputs:
        assert output.accepted == [3, 0, 0, 3, 3, 0, 0, 3]


@pytest.mark.parametrize("window", [8, 3])
def test_a14_sliding_windows_draft_and_are_drafted_for(window: int) -> None:
    target = tiny_target("mistral", sliding_window=window, num_hidden_layers=2)
    prompts = prompts_of(6, 11)
    plain = generate(target, NoDrafter(), prompts, max_new_tokens=41)
    for growth in (Chain(4), Static((2, 2, 1))):
        outputs = generate(target, DraftModel(target), prompts, growth=growth, max_new_tokens=41)
        assert [o.ids for o in outputs] == [o.ids for o in plain]
        assert all(o.tau == growth.depth + 1 for o in outputs)


@pytest.mark.slow
def test_a_model_of_another_kind_drafts() -> None:
    """GPT-2 has no lean forward: the reference engine drafts over the same cells."""
    target, small = tiny_target(), tiny_target("gpt2", engine="reference", num_hidden_layers=2)
    prompts = prompts_of(6, 3)
    plain = generate(target, NoDrafter(), prompts, max_new_tokens=15)
    for growth in (Chain(3), Static((2, 2)), Dynamic(6, 2, 3)):
        outputs = generate(target, DraftModel(small), prompts, growth=growth, max_new_tokens=15)
        assert [o.ids for o in outputs] == [o.ids for o in plain]
    itself = generate(small, DraftModel(small), prompts, growth=Chain(3), max_new_tokens=13)
    assert [o.tau for o in itself] == [4, 4]


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("growth", [Chain(4), Dynamic(8, 3, 3)], ids=str)
def test_a15_a_shorter_context_ends_drafting_not_the_text(family: str, growth: Growth) -> None:
    target = tiny_target()
    engine = "reference" if family == "gpt2" else "fast"
    small = tiny_target(family, engine=engine, max_position_embeddings=32, seed=0)
    prompts = prompts_of(28, 5)
    plain = generate(target, NoDrafter(), prompts, max_new_tokens=64)
    with pytest.warns(UserWarning, match="outgrew the drafter's context") as caught:
        outputs = generate(target, DraftModel(small), prompts, growth=growth, max_new_tokens=64)
    assert len(caught) == 1
    assert [o.ids for o in outputs] == [o.ids for o in plain]
    for output, prompt in zip(outputs, prompts, strict=True):
        text, cut = len(prompt) + 1, False
        for accepted, drafted in zip(output.accepted, output.drafted, strict=True):
            # the last guess that is fed lies at position text + depth - 2
            cut = cut or text + growth.depth - 1 > 32
            if cut:
                assert drafted == 0
            elif text + growth.depth < len(prompt) + 64:
                assert drafted > 0
            text += accepted + 1
        assert cut


def test_a_context_that_the_prompt_fills_drafts_nothing() -> None:
    target, small = tiny_target(), tiny_target(max_position_embeddings=16)
    with pytest.warns(UserWarning, match="outgrew"):
        (output,) = generate(target, DraftModel(small), prompts_of(20), max_new_tokens=6)
    assert output.drafted == [0] * 5


def test_a18_another_size_is_refused() -> None:
    target = tiny_target(vocab_size=160)
    drafter = DraftModel(tiny_target())
    message = "tiny-llama has a vocabulary of 128 ids, target tiny-llama one of 160"
    with pytest.raises(UserError, match=message):
        generate(target, drafter, prompts_of(4), max_new_tokens=4)


def test_a18_swapped_strings_are_refused(tmp_path: Path) -> None:
    target = Target.load(save_tiny_target(tmp_path / "target"))
    folder = save_tiny_target(tmp_path / "small", num_hidden_layers=1)
    assert load_drafter(folder, target).name == "draft_model"
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = (next(k for k, v in vocabulary.items() if v == i) for i in (70, 81))
    vocabulary[first], vocabulary[second] = 81, 70
    tokenizer["model"]["merges"] = []
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"id 70 is .* for draft model .*small and .* for target"):
        load_drafter(folder, target)


@pytest.mark.parametrize(("ours", "theirs"), [(272, 265), (265, 272)])
def test_padded_embeddings_of_one_tokenizer_fit(ours: int, theirs: int) -> None:
    """Models of one family pad their tables differently; rows beyond the tokenizer's are cut."""
    tokenizer = tiny_tokenizer()
    target = Target(tiny_model(vocab_size=theirs), tokenizer, name="target")
    small = Target(tiny_model(vocab_size=ours, num_hidden_layers=1), tokenizer, name="small")
    plain = generate(target, NoDrafter(), prompts_of(5), max_new_tokens=12)
    for draft in ("argmax", "sampled"):
        for temperature in (0.0, 1.0):
            (output,) = generate(
                target,
                DraftModel(small),
                prompts_of(5),
                growth=Chain(3, draft),
                max_new_tokens=12,
                temperature=temperature,
            )
            assert len(output.ids) == 12
            assert temperature or output.ids == plain[0].ids


def test_a_folder_is_loaded_in_the_targets_dtype(tmp_path: Path) -> None:
    target = Target.load(save_tiny_target(tmp_path / "target"), dtype="bfloat16")
    drafter = load_drafter(save_tiny_target(tmp_path / "small", num_hidden_layers=1), target)
    assert isinstance(drafter, DraftModel)
    assert drafter.model.dtype == torch.bfloat16
    assert len(generate(target, drafter, [[5, 6]], max_new_tokens=5)[0].ids) <= 5
    alone = load_drafter(tmp_path / "small")
    assert isinstance(alone, DraftModel)
    assert alone.model.dtype == torch.float32


def test_the_only_option_is_the_model(tmp_path: Path) -> None:
    target = tiny_target()
    folder = save_tiny_target(tmp_path / "small", vocab_size=265)
    drafter = build_drafter("draft_model", {"model": str(folder)}, target.shape)
    assert isinstance(drafter, DraftModel)
    for options, given in (({}, "none"), ({"gama": 1}, "gama"), ({"model": 3}, "model")):
        with pytest.raises(UserError, match=f"one option, model: .* got {given}"):
            build_drafter("draft_model", options, target.shape)


def test_vocabularies_are_compared_once_a_target() -> None:
    target = tiny_target()
    drafter = DraftModel(target)
    drafter.check(target)
    other = tiny_target(vocab_size=96)
    with pytest.raises(UserError, match="128 ids"):
        drafter.check(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafter.check(target)

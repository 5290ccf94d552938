"""The contract that every drafter family keeps, parametrised over the registry.

A new family needs an entry in OPTIONS only if its defaults do not fit a tiny target.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from drafters.base import Batch, Drafter, NeuralDrafter
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.growth import Chain, Dynamic, Growth, Static
from drafters.registry import build_drafter, methods
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from drafters.tree import TokenTree
from inference import generate
from inference.engine import Decoder, Request
from inference.stop import Stop
from tests.folders import letters
from tests.tiny import prompts_of, tiny_model, tiny_target

OPTIONS: dict[str, dict[str, object]] = {
    "dflash": {"draft_vocab_size": 64, "taps": [0, 1, 2], "qk_norm": True},
    "dflash2": {"draft_vocab_size": 64, "taps": [0, 1, 2], "selector_rank": 8},
    "dspark": {"draft_vocab_size": 64, "taps": [0, 2], "attention_bias": True},
    "eagle": {"draft_vocab_size": 64, "taps": [0, 1, 2]},
    "eagle1": {"draft_vocab_size": 64, "unroll": 3},
    "hydra": {"draft_vocab_size": 64},
    "medusa": {"draft_vocab_size": 64},
    "mtp": {"draft_vocab_size": 64, "modules": 2},
    "peagle": {"draft_vocab_size": 64, "taps": [0, 1, 2], "layers": 2},
    "self_window": {"sinks": 1, "window": 6},
    "standalone": {"draft_vocab_size": 64, "num_layers": 2},
}
SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64}
PROMPTS = prompts_of(20, 5, 13, 1)
GROWTHS: list[Growth] = [Chain(3), Static((2, 1, 2)), Dynamic(6, 3, 3)]
SAMPLED: list[Growth] = [Chain(3, "sampled"), Static((3, 2), "sampled"), Dynamic(6, 3, 3)]
NAMES = sorted(methods())
# Drafts come of what the rounds before showed, in which a row's neighbours have no part.
REMEMBER_ROUNDS = {"lookahead"}
NEURAL = [name for name in NAMES if issubclass(methods()[name], NeuralDrafter)]


def lettered(seed: int = 0) -> Target:
    target = tiny_target(seed=seed, **SIZES)
    target.tokenizer = letters()
    return target


@pytest.fixture(scope="module")
def target() -> Target:
    return lettered()


@pytest.fixture(scope="module")
def truth(target: Target) -> list[list[int]]:
    plain = build_drafter("none", {}, target.shape)
    return [out.ids for out in generate(target, plain, PROMPTS, max_new_tokens=16)]


def make(name: str, target: Target, seed: int = 5) -> Drafter:
    torch.manual_seed(seed)
    options = dict(OPTIONS.get(name, {}))
    if name == "draft_model":
        options["model"] = Target(tiny_model(seed=9, num_hidden_layers=2), name="small")
    if name == "universal":  # the same characters, other ids
        small = tiny_model(seed=9, num_hidden_layers=2)
        options["model"] = Target(small, letters(roll=20), name="small")
        target.tokenizer = target.tokenizer or letters()  # what drafts are translated into
    if name == "hybrid":  # what a row has learned is not in its text
        options = {"members": ["ngram", make("medusa", target)], "learn": False}
    drafter = build_drafter(name, options, target.shape)
    if isinstance(drafter, NeuralDrafter):
        with contextlib.suppress(UserError):  # layers of another kind: it stays as it was made
            drafter.init_from(target)
        for parameter in drafter.parameters():  # away from special starting points
            parameter.data += 0.05 * torch.randn_like(parameter)
        drafter.eval()
    return drafter


@pytest.fixture(scope="module", params=NAMES)
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    return make(request.param, target)


@pytest.fixture(scope="module", params=NEURAL)
def neural(request: pytest.FixtureRequest, target: Target) -> NeuralDrafter:
    drafter = make(request.param, target)
    assert isinstance(drafter, NeuralDrafter)
    return drafter


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_fifty_targets_decode_greedily_what_they_are(name: str) -> None:
    """Another target, other weights of the drafter and another text every time, in trees."""
    for seed in range(50):
        target = lettered(seed)
        drafter = make(name, target, seed)
        plain = build_drafter("none", {}, target.shape)
        prompt = torch.randint(128, (1 + seed,), generator=torch.Generator().manual_seed(seed))
        texts = [
            generate(target, one, [prompt.tolist()], growth=GROWTHS[1 + seed % 2], max_new_tokens=8)
            for one in (plain, drafter)
        ]
        assert texts[0][0].ids == texts[1][0].ids, seed


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
def test_greedy_output_is_the_targets_own(
    drafter: Drafter, growth: Growth, target: Target, truth: list[list[int]]
) -> None:
    outputs = generate(target, drafter, PROMPTS, growth=growth, max_new_tokens=16, rows=3)
    assert [out.ids for out in outputs] == truth


@pytest.mark.slow
@pytest.mark.parametrize("growth", SAMPLED, ids=str)
def test_a_row_is_what_it_is_alone(drafter: Drafter, growth: Growth, target: Target) -> None:
    """Sampled rows of unequal length, more than fit at once, under every growth."""
    sampling = {"growth": growth, "max_new_tokens": 8, "temperature": 0.8, "top_p": 0.95}
    # a prompt draws from streams of its own number, so it is decoded in its place
    together, alone = (
        generate(target, drafter, PROMPTS, rows=rows, seed=7, **sampling) for rows in (3, 1)
    )
    for one, other in zip(together, alone, strict=True):
        assert one.ids == other.ids
        assert one.accepted == other.accepted


def rounds_of(
    target: Target, drafter: Drafter, growth: Growth, prompt: list[int], count: int
) -> Iterator[tuple[list[int], TokenTree]]:
    """Decode greedily; yield the text before each round and the tree proposed in it."""
    decoder = Decoder(
        target, drafter, growth, rows=1, capacity=len(prompt) + count, warp=Warp(), stop=Stop()
    )
    decoder.admit({0: Request(prompt, count, RowRandom(0))})
    row = decoder.rows[0]
    assert row is not None
    while decoder.running:
        before = list(row.ids)
        commit = decoder.round()[0]
        assert commit is not None
        assert commit.tree is not None
        yield before, commit.tree


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
def test_proposals_depend_on_the_text_alone(
    drafter: Drafter, growth: Growth, target: Target
) -> None:
    """After any accepted length a session proposes what a fresh one proposes for the same text."""
    if drafter.name in REMEMBER_ROUNDS:
        pytest.skip("drafts depend on the rounds before")
    for before, tree in rounds_of(target, drafter, growth, PROMPTS[0], 12):
        tree.check()
        assert tree.root == before[-1]
        assert tree.drafted <= growth.nodes
        # the fresh session prefills all but the root, so the root must be the greedy next token
        _, fresh = next(rounds_of(target, drafter, growth, before[:-1], 17))
        depth = int(tree.depth.max())  # the last rounds are cut to what may still be emitted
        assert fresh.limit(depth).token_list == tree.token_list
        assert fresh.limit(depth).parent_list == tree.parent_list


def batch_of(target: Target, drafter: NeuralDrafter, ids: Tensor) -> Batch:
    document = torch.zeros_like(ids)
    position = torch.arange(ids.shape[1]).expand_as(ids)
    taps, last = target.forward_batch(ids, document, position, drafter.features)
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), document, position, taps, last)


def logits_by_place(
    drafter: NeuralDrafter, target: Target, batch: Batch
) -> dict[tuple[int, int], Tensor]:
    """Return {(depth, position): logits} of one sequence."""
    found = {}
    with torch.no_grad():
        for prediction in drafter.predict(batch, target):
            logits = prediction.logits(slice(0, len(prediction.positions)))
            for place, row in zip(prediction.positions.tolist(), logits, strict=True):
                found[prediction.depth, place] = row
    return found


def test_a_prediction_sees_nothing_later(neural: NeuralDrafter, target: Target) -> None:
    """Changing tokens after t changes no prediction of the law after token t or earlier."""
    ids = torch.tensor([prompts_of(16, seed=4)[0]])
    changed = ids.clone()
    cut = 9
    changed[0, cut + 1 :] = (changed[0, cut + 1 :] + 1) % 128
    before, after = (
        logits_by_place(neural, target, batch_of(target, neural, x)) for x in (ids, changed)
    )
    early = [key for key in before if key[1] <= cut]
    late = [key for key in before if key[1] > cut]
    assert early
    for key in early:
        assert torch.allclose(before[key], after[key], atol=1e-4), key
    assert any(not torch.allclose(before[key], after[key], atol=1e-2) for key in late)


def test_training_predicts_what_decoding_proposes(neural: NeuralDrafter, target: Target) -> None:
    """Depth by depth, on the target's own text: the argmax chain of decoding equals training's.

    So agreement measured in training is acceptance measured in decoding.
    """
    gamma = 3
    compared = 0
    for before, tree in rounds_of(target, neural, Chain(gamma), PROMPTS[0], 16):
        guesses = tree.token_list[1:]
        ids = torch.tensor([[*before, *guesses, 0]])
        places = logits_by_place(neural, target, batch_of(target, neural, ids))
        for depth, guess in enumerate(guesses, start=1):
            # depth 1 follows the root, the text's last token at position len - 1; a drafter that
            # is trained on one depth predicts the others in the same way
            place = len(before) - 2 + depth
            logits = places[depth if (depth, place) in places else 1, place]
            best = int(logits.argmax())
            assert guess == (best if neural.ids is None else int(neural.ids[best]))
            compared += 1
    assert compared > gamma


def test_save_load_and_propose_the_same(
    neural: NeuralDrafter, target: Target, tmp_path: Path
) -> None:
    save_drafter(neural, tmp_path / "d", target)
    loaded = load_drafter(tmp_path / "d", target)
    assert isinstance(loaded, NeuralDrafter)
    assert loaded.options() == neural.options()
    for growth in GROWTHS:
        first, again = (
            [tree.token_list for _, tree in rounds_of(target, x, growth, PROMPTS[2], 8)]
            for x in (neural, loaded)
        )
        assert first == again


def test_a_file_holds_only_what_is_trained(
    neural: NeuralDrafter, target: Target, tmp_path: Path
) -> None:
    """No tensor of the target's: every tensor is a trained parameter, or the draft vocabulary, or
    a few numbers that were calibrated.
    """
    folder = save_drafter(neural, tmp_path / "d", target)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    trained = {name for name, p in neural.named_parameters() if p.requires_grad}
    buffers = dict(neural.named_buffers())
    assert all(b.dtype == torch.int64 or b.numel() <= 16 for b in buffers.values())
    assert names == trained | set(buffers)
    batch = batch_of(target, neural, torch.tensor([prompts_of(16)[0]]))
    loss = torch.zeros(())
    for p in neural.train().predict(batch, target):
        loss = loss + p.logits(slice(0, len(p.positions))).logsumexp(-1).sum()
        loss = loss + sum(other.sum() for other in p.auxiliary.values())
    neural.zero_grad()
    loss.backward()
    neural.eval()
    for name, parameter in neural.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_another_target_is_refused(neural: NeuralDrafter, target: Target, tmp_path: Path) -> None:
    folder = save_drafter(neural, tmp_path / "d", target)
    other = lettered(seed=1)
    with pytest.raises(UserError, match="its weights is"):
        load_drafter(folder, other)
    with pytest.raises(UserError, match="its vocab_size is 128, tiny-llama has 96"):
        load_drafter(folder, tiny_target(**{**SIZES, "vocab_size": 96}))
    with pytest.raises(UserError, match="its hidden_size is 32, tiny-llama has 64"):
        load_drafter(folder, tiny_target(**{**SIZES, "hidden_size": 64}))


def test_missing_and_unused_tensors_are_named(
    neural: NeuralDrafter, target: Target, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_drafter(neural, tmp_path / "d", target)
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[0]
    moved = {("other" if k == name else k): v for k, v in tensors.items()}
    save_file(moved, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"missing tensors \['{name}'\], unused .*'other'"):
        load_drafter(folder, target)


def test_unknown_options_are_refused(target: Target) -> None:
    for name in NAMES:
        with pytest.raises(UserError, match=r"gama|no options|one option"):
            build_drafter(name, {"gama": 1}, target.shape)


def test_the_target_as_its_own_drafter_is_always_right(target: Target) -> None:
    """D-SELF: everything is accepted, so tau is gamma + 1."""
    drafter = build_drafter("draft_model", {"model": target}, target.shape)
    for growth, tau in ((Chain(3), 4), (Static((2, 2)), 3)):
        outputs = generate(target, drafter, PROMPTS, growth=growth, max_new_tokens=1 + 6 * tau)
        assert [out.tau for out in outputs] == [tau] * len(PROMPTS)
    sampled = Chain(3, "sampled")
    outputs = generate(target, drafter, PROMPTS, growth=sampled, max_new_tokens=25, temperature=0.9)
    assert [out.tau for out in outputs] == [4] * len(PROMPTS)


def test_drafters_are_not_targets(target: Target) -> None:
    assert not isinstance(target, nn.Module)

"""Hydra: every head reads its path's tokens, in training as in decoding."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters.base import Commit
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.growth import Chain, Static
from drafters.methods.hydra import HydraDrafter
from drafters.methods.none import NoDrafter
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from inference import generate
from tests.neural import away, batch_of, check_accepted, learn
from tests.tiny import prompts_of, tiny_model, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(initializer_range=0.2)


def make(target: Target, **options: object) -> HydraDrafter:
    """Build a drafter away from every special starting point."""
    return away(HydraDrafter, target, 0.05, **options)


def logits_of(drafter: HydraDrafter, target: Target, last: Tensor, path: Sequence[int]) -> Tensor:
    """Return the logits [K] below a path of tokens, root first, written out."""
    embedded = target.embed(torch.tensor(path)).to(last.dtype)
    return drafter.logits(len(path) - 1, torch.cat((last, embedded.flatten())))


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("size", [0, 48])
def test_at_the_start_every_head_is_the_targets(size: int, blocks: int, target: Target) -> None:
    drafter = HydraDrafter.build({"draft_vocab_size": size, "blocks": blocks}, target.shape)
    drafter.init_from(target)
    last, root = torch.randn(64), [5, 9, 2, 7]
    for head in range(4):
        logits = logits_of(drafter, target, last, root[: head + 1])
        torch.testing.assert_close(logits, target.head(last[None], drafter.ids)[0])


def test_head_k_at_i_reads_tokens_up_to_i_plus_k_plus_1(target: Target) -> None:
    drafter = make(target, heads=3)
    ids = torch.tensor(prompts_of(7, 7))
    batch = batch_of(target, drafter, ids)
    batch.label_mask[1, :5] = False
    for head, prediction in enumerate(drafter.predict(batch, target)):
        first = [slot for slot in range(7) if slot + head + 2 < 7]
        second = [7 + slot for slot in range(7) if 5 <= slot + head + 2 < 7]
        assert prediction.group.tolist() == first + second
        assert torch.equal(prediction.positions, prediction.group + head + 1)
        assert prediction.depth == head + 1
        logits = prediction.logits(slice(0, 99))
        for place, mine in zip(prediction.group.tolist(), logits, strict=True):
            row, slot = divmod(place, 7)
            path = ids[row, slot + 1 : slot + head + 2].tolist()
            expected = logits_of(drafter, target, batch.last[row, slot], path)
            torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("options", [{}, {"shared_head": False, "blocks": 2}], ids=str)
def test_every_node_asks_the_head_that_training_trains(options: dict[str, object]) -> None:
    """All nodes of trees over two rows, in double precision: best children of their own path."""
    target = Target(tiny_model(initializer_range=0.2).double())
    drafter = make(target, draft_vocab_size=48, **options).double()
    batch = batch_of(target, drafter, torch.tensor(prompts_of(9, 9)))
    session = drafter.start(target, Static((3, 2, 2)), 2, 20)
    lengths = [4, 7]
    session.observe(
        [
            Commit(batch.ids[row, :n], int(batch.ids[row, n]), last=batch.last[row, :n])
            for row, n in enumerate(lengths)
        ]
    )
    trees = session.propose(Warp(), [RowRandom(0), RowRandom(1)])
    assert drafter.ids is not None
    for row, (length, tree) in enumerate(zip(lengths, trees, strict=True)):
        assert tree is not None
        for node, children in enumerate(tree.children):
            if not children:
                continue
            path = [node]
            while path[0]:
                path.insert(0, tree.parent_list[path[0]])
            tokens = [tree.token_list[i] for i in path]
            logits = logits_of(drafter, target, batch.last[row, length - 1], tokens)
            best = drafter.ids[logits.topk(len(children)).indices].tolist()
            assert [tree.token_list[child] for child in children] == best


def test_siblings_have_laws_of_their_own(target: Target) -> None:
    drafter = make(target)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(6)))
    session = drafter.start(target, Static((2, 3)), 1, 20)
    session.observe([Commit(batch.ids[0, :5], int(batch.ids[0, 5]), last=batch.last[0, :5])])
    tree = session.propose(Warp(), [RowRandom(0)])[0]
    assert tree is not None
    assert tree.token_list[3:6] != tree.token_list[6:9]


def test_a_copy_task_is_learned_at_every_depth(target: Target) -> None:
    """x[t] = t mod 7: each head must learn its own shift, so one slip of alignment shows."""
    drafter = make(target, heads=3, shared_head=False)
    ids = (torch.arange(30) % 7)[None]
    batch = batch_of(target, drafter, ids)
    learn(drafter, target, batch, 60, 1e-2)
    for head, prediction in enumerate(drafter.predict(batch, target)):
        guess = prediction.logits(slice(0, 99)).argmax(-1)
        assert torch.equal(guess, (torch.arange(30 - head - 2) + head + 2) % 7)


def test_what_is_learned_is_accepted_after_a_reload(target: Target, tmp_path: Path) -> None:
    prompts = prompts_of(8, 8, seed=2)
    texts = [o.ids for o in generate(target, NoDrafter(), prompts, max_new_tokens=30)]
    drafter = make(target, heads=3)
    ids = torch.tensor([p + t for p, t in zip(prompts, texts, strict=True)])
    learn(drafter, target, batch_of(target, drafter, ids), 40, 1e-2)
    again = load_drafter(save_drafter(drafter, tmp_path / "d", target), target)
    check_accepted(target, again, prompts, texts, Chain(3), 3)


def test_more_levels_than_heads_are_refused(target: Target) -> None:
    drafter = make(target, heads=3)
    with pytest.raises(UserError, match="4 levels deep and this drafter has 3 heads"):
        drafter.start(target, Chain(4), 1, 20)
    drafter.start(target, Chain(3), 1, 20)


def test_options_are_resolved_and_build_the_same_again(target: Target) -> None:
    drafter = make(target, blocks=2, draft_vocab_size=48)
    assert HydraDrafter.build(drafter.options(), target.shape).options() == drafter.options()
    with pytest.raises(UserError, match="drafter hydra: unknown key 'head'"):
        HydraDrafter.build({"head": 3}, target.shape)

"""Medusa: heads start as the target's own, predict what decoding proposes, and say their limits."""

from pathlib import Path

import pytest
import torch

from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.growth import Chain, Dynamic, Growth, Static
from drafters.heads import HeadsOptions
from drafters.methods.medusa import MedusaDrafter
from drafters.methods.none import NoDrafter
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from drafters.tree import TokenTree
from inference import generate
from tests.neural import away, batch_of, check_accepted, commits_of, learn
from tests.tiny import prompts_of, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(initializer_range=0.2)


def make(target: Target, **options: object) -> MedusaDrafter:
    """Build a drafter away from every special starting point."""
    return away(MedusaDrafter, target, 0.05, **options)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size", [0, 48])
def test_at_the_start_every_head_is_the_targets(size: int, shared: bool, target: Target) -> None:
    options = {"draft_vocab_size": size, "shared_head": shared, "blocks": 2}
    drafter = MedusaDrafter.build(options, target.shape)
    ids = torch.arange(0, 128, 128 // size)[:size] if size else None
    if ids is not None:
        drafter.vocabulary.keep(ids)
    drafter.init_from(target)
    last = torch.randn(5, 64)
    for head in range(4):
        torch.testing.assert_close(drafter.logits(head, last), target.head(last, ids))


def test_one_matrix_serves_all_heads_unless_told(target: Target) -> None:
    shared, private = make(target), make(target, shared_head=False)
    assert [len(d.linears()) for d in (shared, private)] == [1, 4]
    counts = [sum(p.numel() for p in d.parameters()) for d in (shared, private)]
    assert counts[1] - counts[0] == 3 * 128 * 64


def test_head_k_at_i_predicts_position_i_plus_k_plus_1(target: Target) -> None:
    drafter = make(target, heads=3)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(7, 7)))
    batch.label_mask[1, :5] = False
    predictions = drafter.predict(batch, target)
    for head, prediction in enumerate(predictions):
        first = [slot for slot in range(7) if slot + head + 2 < 7]
        second = [7 + slot for slot in range(7) if 5 <= slot + head + 2 < 7]
        assert prediction.group.tolist() == first + second
        assert torch.equal(prediction.positions, prediction.group + head + 1)
        assert prediction.depth == head + 1
        expected = drafter.logits(head, batch.last.flatten(0, 1)[prediction.group])
        torch.testing.assert_close(prediction.logits(slice(0, 99)), expected)


def test_a_copy_task_is_learned_at_every_depth(target: Target) -> None:
    """x[t] = t mod 7: each head must learn its own shift, so one slip of alignment shows."""
    drafter = make(target, heads=3, shared_head=False)
    ids = (torch.arange(30) % 7)[None]
    batch = batch_of(target, drafter, ids)
    learn(drafter, target, batch, 60, 1e-2)
    for head in range(3):
        known = 30 - head - 2  # later slots have no label
        guess = drafter.logits(head, batch.last[0, :known]).argmax(-1)
        assert torch.equal(guess, (torch.arange(known) + head + 2) % 7)


@pytest.mark.parametrize("options", [{}, {"shared_head": False, "blocks": 2}], ids=str)
def test_decoding_asks_the_heads_that_training_trains(
    options: dict[str, object], target: Target
) -> None:
    drafter = make(target, draft_vocab_size=48, **options)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(9, 9)))
    session = drafter.start(target, Chain(4), 2, 20)
    session.observe(commits_of(batch, [4, 7]))
    trees = session.propose(Warp(), [RowRandom(0), RowRandom(1)])
    for row, (length, tree) in enumerate(zip([4, 7], trees, strict=True)):
        assert tree is not None
        assert drafter.ids is not None
        last = batch.last[row, length - 1]
        best = torch.stack([drafter.logits(k, last).argmax() for k in range(4)])
        assert tree.token_list == [int(batch.ids[row, length]), *drafter.ids[best].tolist()]


def test_every_node_of_a_depth_has_the_same_law(target: Target) -> None:
    drafter = make(target)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(6)))
    session = drafter.start(target, Static((2, 3)), 1, 20)
    session.observe(commits_of(batch, [5]))
    tree = session.propose(Warp(), [RowRandom(0)])[0]
    assert tree is not None
    assert tree.token_list[3:6] == tree.token_list[6:9]


def test_rows_come_and_go(target: Target) -> None:
    drafter = make(target)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(6, 6)))
    session = drafter.start(target, Chain(2), 2, 20)
    session.observe(commits_of(batch, [3, 5]))
    first = session.propose(Warp(), [RowRandom(0), RowRandom(1)])
    assert session.propose(Warp(), [None, None]) == [None, None]
    session.observe([None, commits_of(batch, [3, 4])[1]])
    again = session.propose(Warp(), [RowRandom(0), None])
    assert again[1] is None
    assert again[0] is not None
    assert first[0] is not None
    assert again[0].token_list == first[0].token_list


def test_training_does_not_reach_a_running_session(target: Target) -> None:
    drafter = make(target)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(6)))
    session = drafter.start(target, Chain(4), 1, 20)
    session.observe(commits_of(batch, [5]))

    def tokens() -> list[int]:
        tree = session.propose(Warp(), [RowRandom(0)])[0]
        assert isinstance(tree, TokenTree)
        return tree.token_list

    before = tokens()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_()
    assert tokens() == before


@pytest.mark.parametrize("growth", [Chain(4), Static((1, 1, 1, 1)), Dynamic(4, 1, 4)], ids=str)
def test_a51_more_levels_than_heads_are_refused(growth: Growth, target: Target) -> None:
    drafter = make(target, heads=3)
    message = r"4 levels deep and this drafter has 3 heads: give gamma, depth or .* from 1 to 3"
    with pytest.raises(UserError, match=message):
        drafter.start(target, growth, 1, 20)
    drafter.start(target, Chain(3), 1, 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": 3}, "drafter medusa: unknown key 'head'; the nearest known key is 'heads'"),
        ({"heads": 0}, "heads is 0, blocks 1: give 1 or more"),
        ({"blocks": 0}, "heads is 4, blocks 0: give 1 or more"),
        ({"shared_head": "maybe"}, "shared_head = 'maybe' is not allowed; give true or false"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, object], message: str, target: Target
) -> None:
    with pytest.raises(UserError, match=message):
        MedusaDrafter.build(options, target.shape)


def test_options_are_resolved_and_build_the_same_again(target: Target) -> None:
    drafter = make(target, blocks=2, draft_vocab_size=48)
    assert drafter.options() == {
        "heads": 4,
        "blocks": 2,
        "draft_vocab_size": 48,
        "shared_head": True,
    }
    assert MedusaDrafter.build(drafter.options(), target.shape).options() == drafter.options()
    assert make(target).options()["draft_vocab_size"] == 0  # 8192 is more than there are


def test_what_is_learned_is_accepted_after_a_reload(target: Target, tmp_path: Path) -> None:
    prompts = prompts_of(8, 8, seed=2)
    texts = [o.ids for o in generate(target, NoDrafter(), prompts, max_new_tokens=30)]
    drafter = make(target, heads=3)
    ids = torch.tensor([p + t for p, t in zip(prompts, texts, strict=True)])
    learn(drafter, target, batch_of(target, drafter, ids), 40, 1e-2)
    again = load_drafter(save_drafter(drafter, tmp_path / "d", target), target)
    check_accepted(target, again, prompts, texts, Chain(3), 3)


def test_the_defaults_are_documented() -> None:
    text = HeadsOptions.__doc__ or ""
    assert all(f"{name}:" in text for name in HeadsOptions.__dataclass_fields__)

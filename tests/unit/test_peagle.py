"""P-EAGLE: lines of unknown slots, in training as behind the last token in decoding."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import drafters.session
from drafters.base import Batch
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.growth import Chain, Dynamic, Static
from drafters.methods.none import NoDrafter
from drafters.methods.peagle import PeagleDrafter, PeagleOptions, PeagleSession
from drafters.sampling import Warp
from drafters.target import Target
from inference import generate
from tests.forced import by_slot
from tests.neural import (
    away,
    batch_of,
    check_accepted,
    check_documents_do_not_see_each_other,
    check_every_label_is_predicted_once,
    commits_of,
    learn,
    randoms,
)
from tests.tiny import prompts_of, tiny_model, tiny_target

DEPTHS = 4


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=8, initializer_range=0.2)


def make(target: Target, **options: object) -> PeagleDrafter:
    """Build a drafter away from every special starting point."""
    return away(PeagleDrafter, target, 0.02, **{"layers": 2, "unroll": DEPTHS, **options})


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [512, 4])
@pytest.mark.parametrize(
    "options", [{}, {"draft_vocab_size": 48, "tap_norm": True, "qk_norm": True}], ids=str
)
def test_lines_of_training_are_the_guesses_of_decoding(
    options: dict[str, object], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every depth at every row's last slot, over two commits with guesses between, in doubles."""
    monkeypatch.setattr(drafters.session, "_CHUNK", chunk)
    target = Target(tiny_model(num_hidden_layers=8, initializer_range=0.2).double())
    drafter = make(target, **options).double()
    batch = batch_of(target, drafter, torch.tensor(prompts_of(18, 18, 18)))
    trained = by_slot(drafter.predict(batch, target))
    for depths in (DEPTHS, 1):
        session = drafter.start(target, Chain(depths), 3, 24)
        assert isinstance(session, PeagleSession)
        for start, lengths in ((0, [3, 3, 3]), (3, [5, 8, 13])):
            session.observe(commits_of(batch, lengths, start))
            session.propose(Warp(), randoms(3))
            for row, length in enumerate(lengths):
                for depth in range(depths):
                    expected = trained[depth, row * 18 + length - 1]
                    logits = session.marginals[depth, row]
                    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=1e-9)


def test_a_line_reads_true_slots_up_to_its_own_alone(target: Target) -> None:
    """Index a knows tokens up to a + 1, whatever the depth."""
    drafter = make(target)
    ids = torch.tensor(prompts_of(14))
    batch = batch_of(target, drafter, ids)
    before = by_slot(drafter.predict(batch, target))
    cut = 8
    changed = ids.clone()
    changed[0, cut:] = (changed[0, cut:] + 1) % 128
    after = by_slot(drafter.predict(Batch(changed, *list(asdict(batch).values())[1:]), target))
    for (depth, slot), logits in before.items():
        same = torch.allclose(logits, after[depth, slot], atol=1e-5)
        assert same == (slot + 1 < cut), (depth, slot)


def test_packed_documents_do_not_see_each_other(target: Target) -> None:
    check_documents_do_not_see_each_other(target, make(target))


def test_predictions_cover_every_supervised_label_once(target: Target) -> None:
    check_every_label_is_predicted_once(target, make(target))


def test_training_drops_lines_and_leaves_the_others_as_they_are(target: Target) -> None:
    drafter = make(target, keep=0.5, keep_least=0.2)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(42, 42)))
    batch.label_mask[1, :22] = False  # 40 and 20 lines
    whole = by_slot(drafter.predict(batch, target))
    torch.manual_seed(0)
    predictions = drafter.train().predict(batch, target)
    kept = [p.group.tolist() for p in predictions]
    for row, count in enumerate((40, 20)):
        sizes = [sum(slot // 42 == row for slot in groups) for groups in kept]
        # the last depths lose lines whose label lies beyond the end, too
        for depth, (size, share) in enumerate(zip(sizes, (1, 0.5, 0.25, 0.2), strict=True)):
            assert size <= count * share
            assert size >= count * share - depth
    # in the second row a line may start before the first label that it reaches
    lines = [{slot for slot in groups if slot < 42} for groups in kept]
    assert lines[3] < lines[2] < lines[1] < lines[0]
    for key, logits in by_slot(predictions).items():
        torch.testing.assert_close(logits, whole[key], atol=1e-4, rtol=1e-4)
    torch.manual_seed(0)
    assert [p.group.tolist() for p in drafter.predict(batch, target)] == kept
    assert [p.group.tolist() for p in drafter.predict(batch, target)] != kept


def test_measuring_draws_nothing(target: Target) -> None:
    drafter = make(target)
    before = torch.get_rng_state()
    drafter.predict(batch_of(target, drafter, torch.tensor(prompts_of(9))), target)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_without_labels_predicts_nothing(target: Target) -> None:
    drafter = make(target).train()
    batch = batch_of(target, drafter, torch.tensor(prompts_of(6)))
    batch.label_mask[:] = False
    assert [len(p.positions) for p in drafter.predict(batch, target)] == [0] * DEPTHS


def test_all_nodes_of_a_depth_have_one_law_and_proposing_again_changes_none(
    target: Target,
) -> None:
    drafter = make(target)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(8)))
    session = drafter.start(target, Static((2, 3)), 1, 20)
    session.observe(commits_of(batch, [6]))
    first, again = (session.propose(Warp(), randoms(1))[0] for _ in range(2))
    assert first is not None
    assert again is not None
    assert first.token_list == again.token_list
    assert first.token_list[3:6] == first.token_list[6:9]


@pytest.mark.slow
def test_a_copy_task_is_learned_at_every_depth(target: Target) -> None:
    """x[t] = t mod 7: every depth must learn its own shift, so one slip of alignment shows."""
    drafter = make(target)
    batch = batch_of(target, drafter, (torch.arange(40) % 7)[None])
    learn(drafter, target, batch, 80, 3e-3)
    for depth, prediction in enumerate(drafter.predict(batch, target)):
        guess = prediction.logits(slice(0, 99)).argmax(-1)
        assert torch.equal(guess, (torch.arange(40 - depth - 2) + depth + 2) % 7)


@pytest.mark.slow
def test_what_is_learned_is_accepted_after_a_reload(target: Target, tmp_path: Path) -> None:
    prompts = prompts_of(8, 8, seed=2)
    texts = [o.ids for o in generate(target, NoDrafter(), prompts, max_new_tokens=30)]
    drafter = make(target)
    ids = torch.tensor([p + t for p, t in zip(prompts, texts, strict=True)])
    learn(drafter, target, batch_of(target, drafter, ids), 40, 3e-3)
    again = load_drafter(save_drafter(drafter, tmp_path / "d", target), target)
    for growth in (Chain(3), Dynamic(8, 3, 3)):
        check_accepted(target, again, prompts, texts, growth, 2.5)


def test_more_levels_than_depths_are_refused(target: Target) -> None:
    drafter = make(target)
    with pytest.raises(UserError, match="5 levels deep and this drafter has 4 depths"):
        drafter.start(target, Chain(5), 1, 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keeps": 0.5}, "drafter peagle: unknown key 'keeps'; the nearest known key is 'keep'"),
        ({"keep": 0.0}, r"keep is 0.0, keep_least 0.2: give shares from 0 to 1"),
        ({"keep_least": 1.5}, r"keep is 0.7, keep_least 1.5"),
        ({"unroll": 0}, "unroll 0: give 1 or more"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, object], message: str, target: Target
) -> None:
    with pytest.raises(UserError, match=message):
        PeagleDrafter.build(options, target.shape)


def test_options_are_resolved_and_build_the_same_again(target: Target) -> None:
    drafter = make(target, draft_vocab_size=48)
    again = PeagleDrafter.build(drafter.options(), target.shape)
    assert again.options() == drafter.options()
    assert "keep_least:" in (PeagleOptions.__doc__ or "")

"""EAGLE-1: it imitates the target's last states, and the target's own head reads them."""

from pathlib import Path

import pytest
import torch

from drafters.alignment import slot_prediction
from drafters.base import Batch
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.growth import Chain, Dynamic
from drafters.losses import LossSettings, drafter_loss
from drafters.methods.eagle1 import Eagle1Drafter, Eagle1Options
from drafters.methods.none import NoDrafter
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from drafters.teacher import Teacher
from inference import generate
from tests.forced import Forced, by_slot
from tests.neural import away, batch_of, check_later_tokens_change_nothing, commits_of
from tests.tiny import prompts_of, tiny_model, tiny_target

UNROLL = 3
PUBLISHED = LossSettings(mix={"feature": 1.0, "kl": 0.1})


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(initializer_range=0.2)


def make(target: Target, **options: object) -> Eagle1Drafter:
    """Build a drafter away from every special starting point."""
    return away(Eagle1Drafter, target, 0.02, **options)


def train(drafter: Eagle1Drafter, target: Target, batch: Batch, steps: int) -> list[float]:
    """Train by the published loss; return it a step."""
    teacher = Teacher(target, drafter.ids)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3, weight_decay=0.0)
    drafter.train()
    losses = []
    for _ in range(steps):
        sums = drafter_loss(drafter.predict(batch, target), batch, teacher, PUBLISHED)
        loss = sums.loss.sum() / sums.weight.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    drafter.eval()
    return losses


@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 48}, {"qk_norm": True}], ids=str)
def test_training_steps_equal_decoding_steps(options: dict[str, object]) -> None:
    """Step j at slot t is j self-fed steps on a cache of true states up to t, in doubles."""
    target = Target(tiny_model(initializer_range=0.2).double())
    drafter = make(target, unroll=UNROLL, **options).double()
    ids = torch.tensor(prompts_of(14, 14))
    batch = batch_of(target, drafter, ids)
    trained = by_slot(drafter.predict(batch, target))
    lengths = [5, 9]
    growth = Forced([ids[row, n + 1 : n + UNROLL].tolist() for row, n in enumerate(lengths)])
    session = drafter.start(target, growth, 2, 20)
    randoms = [RowRandom(0, row) for row in range(2)]
    session.observe(commits_of(batch, [3, 3]))
    session.propose(Warp(), randoms)
    session.observe(commits_of(batch, lengths, start=3))
    session.propose(Warp(), randoms)
    for step, logits in enumerate(growth.logits):
        for row, length in enumerate(lengths):
            expected = trained[step, row * 14 + length - 1]
            torch.testing.assert_close(logits[row], expected, atol=1e-9, rtol=1e-9)


def test_the_embedding_comes_first_and_no_norm_lies_in_between(target: Target) -> None:
    drafter = Eagle1Drafter.build({}, target.shape)
    drafter.init_from(target)
    assert not any("norm" in name for name in drafter.state_dict() if "mlp_norm" not in name)
    maps = drafter.parts(target)
    state, embedding = torch.randn(2, 64), torch.randn(2, 64)
    both = torch.cat((embedding, state), -1)
    assert torch.equal(drafter.fusion(both), state)
    drafter.fusion.weight.data = torch.eye(64, 128)
    assert torch.equal(drafter.fusion(both), embedding)
    # attention and MLP silenced, the layer passes on what the fusion gave, and the head reads that
    drafter.layer.out.weight.data.zero_()
    drafter.layer.down.weight.data.zero_()
    rotary = drafter.rotary(torch.arange(2))
    out = maps.advance(state, embedding, rotary, [lambda q, k, v: q.flatten(1)])
    assert torch.equal(out, embedding)
    torch.testing.assert_close(maps.logits(out), target.head(embedding))


def test_later_tokens_change_nothing(target: Target) -> None:
    check_later_tokens_change_nothing(target, make(target, unroll=UNROLL))


def test_an_oracle_reaches_zero_loss(target: Target) -> None:
    """States that are the target's own next ones: neither term of the loss is left."""
    drafter = make(target)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(9, 9)))
    slots = torch.arange(9).expand(2, 9)
    for shift, zero in ((1, True), (0, False), (2, False)):
        state = batch.last.roll(-shift, 1)
        prediction = slot_prediction(batch, slots, 0, state, target.head, hidden=True)
        sums = drafter_loss([prediction], batch, Teacher(target, None), PUBLISHED)
        assert (float(sums.loss.sum() / sums.weight.sum()) < 1e-5) == zero, shift
        assert (float(sums.agreement.sum()) == float(sums.counted.sum())) == zero


def test_noise_is_for_training_alone_and_weaker_in_long_texts(target: Target) -> None:
    drafter = make(target).train()
    torch.manual_seed(0)
    for length, bound in ((8, 0.1), (512, 0.1), (2048, 0.025)):
        features = torch.zeros(1, length, 64)
        found = drafter._noisy(features).abs().max()
        assert 0.9 * bound < float(found) <= bound
    assert drafter.eval()._noisy(features) is features
    assert make(target, noise=0.0).train()._noisy(features) is features
    batch = batch_of(target, drafter, torch.tensor(prompts_of(9)))
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(by_slot(drafter.train().predict(batch, target))[0, 3])
    assert torch.equal(made[0], made[1])
    assert not torch.allclose(made[0], made[2])


def test_the_state_asked_of_a_loss_is_the_one_the_head_reads(target: Target) -> None:
    drafter = make(target, unroll=2)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(9)))
    for prediction in drafter.predict(batch, target):
        hidden = prediction.auxiliary["hidden"]
        assert hidden.shape == (len(prediction.positions), 64)
        torch.testing.assert_close(target.head(hidden), prediction.logits(slice(0, 9)))


@pytest.mark.slow
def test_eagle_2_is_the_same_weights_under_dynamic_growth(target: Target, tmp_path: Path) -> None:
    """What the published loss teaches is accepted, by trees no less than by chains."""
    prompts = prompts_of(8, 8, seed=2)
    texts = [o.ids for o in generate(target, NoDrafter(), prompts, max_new_tokens=40)]
    ids = torch.tensor([p + t for p, t in zip(prompts, texts, strict=True)])
    drafter = make(target, draft_vocab_size=0)
    losses = train(drafter, target, batch_of(target, drafter, ids), 80)
    assert losses[-1] < losses[0] / 2
    again = load_drafter(save_drafter(drafter, tmp_path / "d", target), target)
    taus = []
    for growth in (Chain(3), Dynamic(8, 3, 3)):
        outputs = generate(target, again, prompts, growth=growth, max_new_tokens=40)
        assert [o.ids for o in outputs] == texts
        taus.append(sum(len(o.ids) - 1 for o in outputs) / sum(o.rounds for o in outputs))
    assert taus[0] > 1.5
    assert taus[1] >= taus[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unrol": 2}, "drafter eagle1: unknown key 'unrol'; the nearest known key is 'unroll'"),
        ({"unroll": 0}, "unroll is 0: give 1 or more"),
        ({"noise": -0.1}, r"noise is -0.1: give 0 or more"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, object], message: str, target: Target
) -> None:
    with pytest.raises(UserError, match=message):
        Eagle1Drafter.build(options, target.shape)


def test_the_defaults_are_documented() -> None:
    text = Eagle1Options.__doc__ or ""
    assert all(f"{name}:" in text for name in Eagle1Options.__dataclass_fields__)

"""Losses per position in exact fractions, and their sums over a batch against plain formulas."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drafters import losses
from drafters.base import Batch, Features, Prediction
from drafters.depths import depth_weights, dpace
from drafters.errors import UserError
from drafters.losses import LossSettings, LossSums, drafter_loss
from drafters.target import Target
from drafters.teacher import Teacher, summarise, taught
from tests.tiny import tiny_target

P = torch.tensor([[1 / 2, 1 / 3, 1 / 6]])
Q = torch.tensor([[1 / 4, 1 / 4, 1 / 2]])
LISTS = ([1 / 2, 1 / 3, 1 / 6], [1 / 4, 1 / 4, 1 / 2])
LAW_KINDS = ("kl", "reverse_kl", "js")
KINDS = ("kl", "reverse_kl", "js", "tv", "lk", "lk_hybrid", "ce")


def value(loss: Tensor) -> float:
    return loss.item()


def test_losses_of_two_laws_worked_by_hand() -> None:
    p, q = P.log(), Q.log()
    forward = math.log(2) / 2 + math.log(4 / 3) / 3 + math.log(1 / 3) / 6
    backward = math.log(1 / 2) / 4 + math.log(3 / 4) / 4 + math.log(3) / 2
    assert value(losses.kl(p, q)) == pytest.approx(forward)
    assert value(losses.reverse_kl(p, q)) == pytest.approx(backward)
    middle = [3 / 8, 7 / 24, 1 / 3]
    halves = [sum(x * math.log(x / m) for x, m in zip(t, middle, strict=True)) / 2 for t in LISTS]
    assert value(losses.js(p, q)) == pytest.approx(sum(halves))
    assert value(losses.overlap(p, q)) == pytest.approx(2 / 3)  # 1/4 + 1/4 + 1/6
    assert value(losses.tv(p, q)) == pytest.approx(1 / 3)
    assert value(losses.lk(p, q)) == pytest.approx(math.log(3 / 2))
    weight = math.exp(-3 * 2 / 3)
    hybrid = weight * forward + (1 - weight) / 3
    assert value(losses.lk_hybrid(p, q, p, 3.0)) == pytest.approx(hybrid)
    assert value(losses.ce(q, torch.tensor([2]))) == pytest.approx(math.log(2))


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "js", "tv", "lk"])
def test_a_loss_is_zero_when_the_laws_are_equal(name: str) -> None:
    assert value(getattr(losses, name)(P.log(), P.log())) == pytest.approx(0, abs=1e-6)


def test_js_is_at_most_log_two() -> None:
    p, q = torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[1e-9, 1 - 1e-9]]).log()
    assert value(losses.js(p, q)) == pytest.approx(math.log(2))


def test_losses_beside_the_law_worked_by_hand() -> None:
    hidden, wanted = torch.tensor([[0.5, 3.0]]), torch.tensor([[0.0, 1.0]])
    assert value(losses.feature(hidden, wanted)) == pytest.approx((0.125 + 1.5) / 2)
    logit, alpha = torch.tensor([math.log(3)]), torch.tensor([0.25])  # sigmoid: 3/4
    wanted_bce = -(0.25 * math.log(0.75) + 0.75 * math.log(0.25))
    assert value(losses.confidence(logit, alpha)) == pytest.approx(wanted_bce)


def test_a_law_with_zeros_gives_no_nan() -> None:
    p = torch.tensor([[1.0, 0.0, 0.0]]).log()
    assert value(losses.kl(p, Q.log())) == pytest.approx(math.log(4))
    # a point mass makes -log alpha the cross entropy
    assert value(losses.lk(p, Q.log())) == pytest.approx(math.log(4))


def test_the_gradient_of_log_alpha_is_that_of_tv_over_alpha() -> None:
    torch.manual_seed(1)
    p = torch.randn(4, 5).log_softmax(-1)
    logits = torch.randn(4, 5, requires_grad=True)
    by_lk = torch.autograd.grad(losses.lk(p, logits.log_softmax(-1)).sum(), logits)[0]
    by_tv = torch.autograd.grad(losses.tv(p, logits.log_softmax(-1)).sum(), logits)[0]
    alpha = losses.overlap(p, logits.log_softmax(-1)).detach()
    torch.testing.assert_close(by_lk, by_tv / alpha[:, None])


def test_the_gradient_of_tv_equals_differences() -> None:
    torch.manual_seed(2)
    p = torch.randn(2, 5, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: losses.tv(p, z.log_softmax(-1)), logits)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(vocab_size=32, num_hidden_layers=2, initializer_range=0.2)


def batch_of(
    target: Target, ids: Tensor, mask: Tensor, document: Tensor, position: Tensor
) -> Batch:
    _, last = target.forward_batch(ids, document, position, Features())
    return Batch(ids, mask.bool(), document, position, None, last)


def rows_of(target: Target, lengths: tuple[int, ...], width: int, seed: int = 0) -> Batch:
    """Make right-padded rows whose last two thirds are answers."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 32, (len(lengths), width), generator=generator)
    place = torch.arange(width).expand_as(ids)
    ends = torch.tensor(lengths)[:, None]
    mask = (place >= ends // 3) & (place < ends)
    document = torch.where(place < ends, torch.arange(len(lengths))[:, None], -1)
    return batch_of(target, ids, mask, document, place)


def guesses(
    batch: Batch, width: int, depths: int = 2, seed: int = 3
) -> tuple[Tensor, list[Prediction]]:
    """Make predictions with free logits [depths, N, width], one a depth, for all positions."""
    generator = torch.Generator().manual_seed(seed)
    count = batch.ids.numel()
    logits = torch.randn(depths, count, width, generator=generator, requires_grad=True)
    predictions = []
    for depth in range(1, depths + 1):
        positions = torch.arange(depth, count)  # deeper guesses lack the first positions

        def some(span: slice, depth: int = depth, positions: Tensor = positions) -> Tensor:
            return logits[depth - 1][positions[span]]

        predictions.append(Prediction(positions, depth, positions, some))
    return logits, predictions


def jensen(p: Tensor, q: Tensor) -> Tensor:
    middle = (p + q) / 2
    return ((p * (p / middle).log()).sum() + (q * (q / middle).log()).sum()) / 2


def plain_loss(
    batch: Batch, target: Target, logits: Tensor, ids: Tensor, settings: LossSettings
) -> LossSums:
    """Compute the sums with whole logits and loops, as the definitions read."""
    columns: list[list[Tensor]] = []
    whole = target.head(batch.last).flatten(0, 1)
    inside = {int(t): i for i, t in enumerate(ids)}
    flat = batch.ids.flatten()
    for depth in range(1, len(logits) + 1):
        sums = [torch.zeros(()) for _ in LossSums._fields]
        for t in range(depth, len(flat) - 1):
            if not bool(taught(batch)[t]):
                continue
            law = whole[t].softmax(-1)
            served = (whole[t] / settings.temperature).softmax(-1)[ids]
            q = logits[depth - 1][t].softmax(-1)
            best, weight = int(law.argmax()), settings.decay ** (depth - 1)
            if settings.vocabulary_loss == "mask" and best not in inside:
                weight = 0.0
            kept = served / served.sum()
            kl = (kept * (kept / q).log()).sum()
            alpha = torch.minimum(served, q).sum()
            lam = (-settings.eta * alpha.detach()).exp()
            loss = {
                "kl": kl,
                "reverse_kl": (q * (q / kept).log()).sum(),
                "js": jensen(kept, q),
                "tv": 1 - alpha,
                "lk": -alpha.log(),
                "lk_hybrid": lam * kl + (1 - lam) * (1 - alpha),
                "ce": -q[inside.get(int(flat[t + 1]), 0)].log(),
            }[settings.kind]
            if settings.kind == "ce" and int(flat[t + 1]) not in inside:
                weight = 0.0
            if settings.vocabulary_loss == "full" and settings.kind in LAW_KINDS:
                loss = loss * served.sum()
            hard = -q[inside[best]].log() if best in inside else torch.zeros(())
            loss = (1 - settings.hard) * loss + settings.hard * hard
            sums[0] = sums[0] + weight * loss
            sums[1] = sums[1] + weight
            sums[2] = sums[2] + torch.minimum(law[ids], q).sum().detach()
            sums[3] = sums[3] + float(int(ids[q.argmax()]) == best)
            sums[4] = sums[4] + 1
        columns.append(sums)
    return LossSums(*(torch.stack([c[i] for c in columns]) for i in range(len(LossSums._fields))))


KEPT = torch.tensor([0, 2, 3, 5, 8, 9, 13, 17, 20, 21, 25, 30])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vocabulary_loss": "mask", "hard": 0.25},
        {"vocabulary_loss": "full", "temperature": 0.7, "decay": 0.5},
    ],
)
def test_sums_and_gradients_equal_the_definitions(
    target: Target, kind: str, changes: dict[str, object]
) -> None:
    settings = LossSettings(kind=kind, chunk=5, **changes)  # type: ignore[arg-type]
    batch = rows_of(target, (9, 6), 9)
    logits, predictions = guesses(batch, len(KEPT))
    teacher = Teacher(target, KEPT, settings.temperature)
    found = drafter_loss(predictions, batch, teacher, settings)
    wanted = plain_loss(batch, target, logits, KEPT, settings)
    torch.testing.assert_close(tuple(found), tuple(wanted), atol=2e-5, rtol=2e-5)
    slope = torch.autograd.grad(found.loss.sum(), logits)[0]
    torch.testing.assert_close(
        slope, torch.autograd.grad(wanted.loss.sum(), logits)[0], atol=2e-6, rtol=2e-5
    )


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("budget", [0, 1000])
def test_chunks_and_recomputation_change_nothing(target: Target, chunk: int, budget: int) -> None:
    batch = rows_of(target, (9, 6, 8), 9)
    results = []
    for settings in (LossSettings(chunk=7), LossSettings(chunk=chunk, keep_logits_mb=budget)):
        logits, predictions = guesses(batch, len(KEPT), depths=3)
        sums = drafter_loss(predictions, batch, Teacher(target, KEPT), settings)
        slope = torch.autograd.grad(sums.loss.sum(), logits)[0]
        results.append((*(x.detach() for x in sums), slope))
    torch.testing.assert_close(results[0], results[1])


def test_recomputation_calls_the_head_again_only_when_memory_is_short(target: Target) -> None:
    batch = rows_of(target, (9,), 9)
    for budget, calls in ((0, 2), (1000, 1)):
        made: list[slice] = []
        weight = torch.randn(len(KEPT), 64, requires_grad=True)

        def logits(span: slice, made: list[slice] = made, weight: Tensor = weight) -> Tensor:
            made.append(span)
            return batch.last[0][span] @ weight.T

        positions = torch.arange(9)
        prediction = Prediction(positions, 1, positions, logits)
        settings = LossSettings(keep_logits_mb=budget)
        drafter_loss([prediction], batch, Teacher(target, KEPT), settings).loss.sum().backward()
        assert len(made) == calls


def test_an_oracle_has_no_loss_and_full_agreement(target: Target) -> None:
    batch = rows_of(target, (9, 6), 9)
    whole = target.head(batch.last).flatten(0, 1)
    positions = torch.arange(len(whole))
    oracle = Prediction(positions, 1, positions, lambda span: whole[span])
    sums = drafter_loss([oracle], batch, Teacher(target, None), LossSettings())
    assert sums.loss.item() == pytest.approx(0, abs=1e-4)
    assert sums.agreement.item() == sums.counted.item() == taught(batch).sum()
    assert sums.alpha.item() == pytest.approx(sums.counted.item(), rel=1e-5)


def test_alpha_stays_below_the_mass_of_the_kept_ids(target: Target) -> None:
    batch = rows_of(target, (12,), 12)
    whole = target.head(batch.last).flatten(0, 1)
    positions = torch.arange(len(whole))
    best = Prediction(positions, 1, positions, lambda span: whole[span][:, KEPT])
    sums = drafter_loss([best], batch, Teacher(target, KEPT), LossSettings())
    mass = whole.softmax(-1)[:, KEPT].sum(-1)[taught(batch)].sum()
    # the best law on the kept ids is the target's renormalised, and overlaps in just that mass
    assert sums.alpha.item() == pytest.approx(mass.item(), rel=1e-5)
    assert sums.loss.item() == pytest.approx(0, abs=1e-5)


def test_a_summary_made_before_gives_the_same(target: Target) -> None:
    batch = rows_of(target, (9, 6), 9)
    settings = LossSettings(temperature=0.5)
    _, predictions = guesses(batch, len(KEPT))
    teacher = Teacher(target, KEPT, 0.5)
    summary = summarise(batch, target, 0.5, 4)
    with torch.no_grad():
        given = drafter_loss(predictions, batch, teacher, settings, summary)
        made = drafter_loss(predictions, batch, teacher, settings)
    torch.testing.assert_close(tuple(given), tuple(made))


def test_the_supervised_token_is_the_label_not_the_input(target: Target) -> None:
    """Six tokens, mask 000111: the laws after tokens 2, 3 and 4 are learned, no other."""
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    place = torch.arange(6)[None]
    batch = batch_of(target, ids, torch.tensor([[0, 0, 0, 1, 1, 1]]), torch.zeros_like(ids), place)
    positions = taught(batch).nonzero()[:, 0]
    pairs = [(int(ids[0, t]), int(ids[0, t + 1])) for t in positions]
    assert pairs == [(5, 6), (6, 7), (7, 8)]


def test_a_padded_row_teaches_what_it_teaches_alone(target: Target) -> None:
    both = rows_of(target, (12, 5), 12)
    alone = batch_of(
        target,
        both.ids[1:, :5],
        both.label_mask[1:, :5],
        both.document[1:, :5],
        both.position[1:, :5],
    )
    torch.testing.assert_close(both.last[1, :5], alone.last[0], atol=1e-5, rtol=1e-5)
    head = torch.randn(len(KEPT), 64)

    def total(batch: Batch) -> LossSums:
        positions = torch.arange(batch.ids.numel())
        last = batch.last.flatten(0, 1)
        prediction = Prediction(positions, 1, positions, lambda span: last[span] @ head.T)
        return drafter_loss([prediction], batch, Teacher(target, KEPT), LossSettings())

    first = batch_of(
        target, both.ids[:1], both.label_mask[:1], both.document[:1], both.position[:1]
    )
    parts = [a + b for a, b in zip(total(alone), total(first), strict=True)]
    torch.testing.assert_close(tuple(total(both)), tuple(parts), atol=1e-4, rtol=1e-5)


def test_documents_packed_in_a_row_teach_what_they_teach_apart(target: Target) -> None:
    apart = rows_of(target, (7, 5), 7)
    ids = torch.cat((apart.ids[0, :7], apart.ids[1, :5]))[None]
    mask = torch.cat((apart.label_mask[0, :7], apart.label_mask[1, :5]))[None].clone()
    mask[0, 7] = True  # supervised, but the token before it is another document's
    document = torch.tensor([[0] * 7 + [1] * 5])
    place = torch.cat((torch.arange(7), torch.arange(5)))[None]
    packed = batch_of(target, ids, mask, document, place)
    assert taught(packed).sum() == taught(apart).sum()
    head = torch.randn(len(KEPT), 64)

    def total(batch: Batch) -> LossSums:
        positions = torch.arange(batch.ids.numel())
        last = batch.last.flatten(0, 1)
        prediction = Prediction(positions, 1, positions, lambda span: last[span] @ head.T)
        return drafter_loss([prediction], batch, Teacher(target, KEPT), LossSettings())

    torch.testing.assert_close(tuple(total(packed)), tuple(total(apart)), atol=1e-4, rtol=1e-5)


def test_nothing_supervised_gives_zeros(target: Target) -> None:
    batch = rows_of(target, (6,), 6)
    silent = Batch(
        batch.ids,
        torch.zeros_like(batch.label_mask),
        batch.document,
        batch.position,
        None,
        batch.last,
    )
    _, predictions = guesses(silent, len(KEPT))
    sums = drafter_loss(predictions, silent, Teacher(target, KEPT), LossSettings())
    assert torch.stack(list(sums)).abs().sum() == 0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"kind": "mse"}, "loss.kind"),
        ({"mix": {"mse": 1.0}}, "loss.mix"),
        ({"mix": {"kl": 0.0}}, "loss.mix gives kl"),
        ({"then": "mse"}, "loss.then"),
        ({"then_from": 2.0}, "loss.then_from"),
        ({"depth_weights": "flat"}, "loss.depth_weights"),
        ({"denominator": "rows"}, "loss.denominator"),
        ({"vocabulary_loss": "drop"}, "loss.vocabulary_loss"),
        ({"hard": 1.5}, "loss.hard"),
        ({"temperature": 0.0}, "loss.temperature"),
        ({"decay": 0.0}, "loss.decay"),
        ({"chunk": 0}, "loss.chunk"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, object], name: str) -> None:
    with pytest.raises(UserError, match=name):
        LossSettings(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("mix", [{"kl": 0.5, "ce": 2.0}, {"tv": 0.9, "ce": 0.1, "kl": 0.3}])
def test_a_mix_is_the_weighted_sum_of_its_losses(target: Target, mix: dict[str, float]) -> None:
    batch = rows_of(target, (9, 6), 9)
    logits, predictions = guesses(batch, len(KEPT))
    teacher = Teacher(target, KEPT)

    def found(**changes: object) -> tuple[Tensor, Tensor]:
        sums = drafter_loss(predictions, batch, teacher, LossSettings(chunk=5, **changes))  # type: ignore[arg-type]
        return sums.loss, torch.autograd.grad(sums.loss.sum(), logits)[0]

    parts = [(weight, found(kind=name)) for name, weight in mix.items()]
    mixed = found(mix=mix)
    for index in range(2):
        wanted = sum(weight * part[index] for weight, part in parts)
        torch.testing.assert_close(mixed[index], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("budget", [0, 1000])
def test_what_is_predicted_beside_the_law_is_learned(target: Target, budget: int) -> None:
    batch = rows_of(target, (9, 6), 9)
    _, (prediction, _) = guesses(batch, len(KEPT))
    count = len(prediction.positions)
    hidden = torch.randn(count, 64, requires_grad=True)
    logit = torch.randn(count, requires_grad=True)
    whole = replace(prediction, auxiliary={"hidden": hidden, "confidence": logit})
    teacher = Teacher(target, KEPT)
    mix = {"kl": 1.0, "feature": 0.5, "confidence": 2.0}
    settings = LossSettings(mix=mix, chunk=4, keep_logits_mb=budget)
    sums = drafter_loss([whole], batch, teacher, settings)
    here = taught(batch)[prediction.positions]
    plain = drafter_loss([prediction], batch, teacher, LossSettings(chunk=4))
    laws = teacher.laws(batch, summarise(batch, target, 1.0, 9), prediction.positions[here])
    every = prediction.logits(slice(0, count))[here]
    alpha = torch.minimum(laws.plain, every.softmax(-1)).sum(-1).detach()
    wanted = plain.loss.sum()
    last = batch.last.flatten(0, 1)[prediction.positions[here]]
    wanted = wanted + 0.5 * losses.feature(hidden[here], last).sum()
    wanted = wanted + 2.0 * losses.confidence(logit[here], alpha).sum()
    torch.testing.assert_close(sums.loss.sum(), wanted, atol=1e-4, rtol=1e-5)
    slopes = torch.autograd.grad(sums.loss.sum(), (hidden, logit))
    torch.testing.assert_close(
        slopes, torch.autograd.grad(wanted, (hidden, logit)), atol=1e-5, rtol=1e-4
    )
    with pytest.raises(UserError, match="predicts no hidden"):
        drafter_loss([prediction], batch, teacher, LossSettings(mix={"feature": 1.0}))


def test_denominators_have_names(target: Target) -> None:
    batch = rows_of(target, (9, 6), 9)
    _, predictions = guesses(batch, len(KEPT))
    teacher = Teacher(target, KEPT)
    sums = {
        name: drafter_loss(predictions, batch, teacher, LossSettings(decay=0.5, denominator=name))
        for name in ("weight", "predictions", "tokens")
    }
    counted = sums["weight"].counted
    assert sums["weight"].weight.tolist() == [counted[0], counted[1] / 2]
    assert sums["predictions"].weight.tolist() == counted.tolist()
    assert sums["tokens"].weight.sum() == 18
    for other in sums.values():
        assert torch.equal(other.loss, sums["weight"].loss)


def test_normalised_depth_weights_sum_to_one(target: Target) -> None:
    batch = rows_of(target, (9,), 9)
    _, predictions = guesses(batch, len(KEPT), depths=3)
    settings = LossSettings(depth_weights="normalised", decay=0.6)
    found = depth_weights(predictions, batch, Teacher(target, KEPT), settings)
    assert [float(w[0]) for w in found] == pytest.approx([1 / 1.96, 0.6 / 1.96, 0.36 / 1.96])


def test_dpace_weighs_by_what_a_depth_adds(target: Target) -> None:
    every = torch.ones(1, 3, dtype=torch.bool)
    c = torch.tensor([[0.9, 0.5, 0.2]])
    assert dpace(c, every, 0.5)[0].tolist() == pytest.approx([2.09, 1.14, 0.4275], abs=5e-5)
    some = torch.tensor([[True, False, True]])  # s = .95, 1, .6
    assert dpace(c, some, 0.5)[0].tolist() == pytest.approx([0.95 + 0.57, 0.0, 0.57])
    batch = rows_of(target, (9, 6), 9)
    logits, predictions = guesses(batch, len(KEPT), depths=3)
    # chains: the group of a prediction is where its first token was predicted
    chains = [replace(p, group=p.positions - p.depth) for p in predictions]
    teacher = Teacher(target, KEPT)
    settings = LossSettings(depth_weights="dpace", chunk=4)
    found = depth_weights(chains, batch, teacher, settings)
    allowed, flat = taught(batch), batch.ids.flatten()
    for start in range(len(flat) - 3):
        places = [start + depth for depth in (1, 2, 3)]
        c = torch.zeros(1, 3)
        for depth, t in enumerate(places):
            label = int(teacher.index(flat[t + 1])) if t + 1 < len(flat) else -1
            if label >= 0:
                c[0, depth] = logits[depth][t].softmax(-1)[label].detach()
        wanted = dpace(c, allowed[places][None], 0.5)[0]
        for depth, t in enumerate(places):
            index = int((chains[depth].positions == t).nonzero())
            assert float(found[depth][index]) == pytest.approx(float(wanted[depth]), abs=1e-5)
    sums = drafter_loss(chains, batch, teacher, settings)
    assert bool(torch.isfinite(sums.loss).all())


def test_losses_can_take_turns() -> None:
    settings = LossSettings(kind="kl", then="lk", then_from=0.25, mix={"kl": 1.0, "ce": 1.0})
    assert settings.at(0.2) is settings
    assert settings.at(0.25).terms == {"lk": 1.0}
    assert LossSettings().at(1.0).terms == {"kl": 1.0}

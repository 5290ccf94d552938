"""Losses of drafters against the target's law.

Owns the pure losses per position and `drafter_loss`, which walks a batch in chunks of positions so
that logits over tokens x vocabulary never exist whole. It knows no drafter: predictions come as
positions and a callable, labels and laws are gathered by position. Dividing by a count is the
caller's business.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from drafters.base import Batch, Prediction
from drafters.depths import depth_weights
from drafters.errors import UserError
from drafters.loss_settings import LossSettings as LossSettings
from drafters.rowwise import Goal, Rows, cross_entropy_rows, formula_rows
from drafters.teacher import Summary, Teacher, TeacherLaws, chunks, summarise, taught

_TINY_ALPHA = 1e-5  # LK losses take the log of alpha; source: Samarin et al. 2026, section 3


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) in nats [m]; laws [m, K], p normalised on the K ids."""
    p = log_p.exp()
    # p = 0 contributes 0, not 0 * -inf
    return (p * (log_p.clamp_min(torch.finfo(log_p.dtype).min) - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(q || p) in nats [m]; laws [m, K]."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def ce(log_q: Tensor, label: Tensor) -> Tensor:
    """Return -log q(label) in nats [m]; label [m] indexes q's ids."""
    return -log_q.gather(-1, label[:, None])[:, 0]


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return alpha = sum_x min(p(x), q(x)) [m]: what a token drawn from q is accepted with.

    With p over the full vocabulary gathered on q's ids, not renormalised, it is at most p's mass
    on them.
    """
    return torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


def js(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || m) / 2 + KL(q || m) / 2 with m = (p + q) / 2 in nats [m], at most log 2."""
    middle = torch.logaddexp(log_p, log_q) - math.log(2)
    return (kl(log_p, middle) + kl(log_q, middle)) / 2


def tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return 1 - alpha [m], the total variation between p and q."""
    return 1 - overlap(log_p, log_q)


def lk(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return -log alpha [m]. Source: Samarin et al. 2026 (arXiv 2602.23881), L_alpha."""
    return -overlap(log_p, log_q).clamp_min(_TINY_ALPHA).log()


def lk_hybrid(log_p: Tensor, log_q: Tensor, log_kept: Tensor, eta: float) -> Tensor:
    """Return lam KL + (1 - lam) (1 - alpha) [m] with lam = exp(-eta alpha), per position.

    Args:
        log_p: [m, K] p over the full vocabulary on the kept ids; alpha is taken with it.
        log_q: [m, K].
        log_kept: [m, K] the law that KL is taken with.
        eta: how fast the weight moves from KL to alpha.

    Source: Samarin et al. 2026 (arXiv 2602.23881), L_hybrid.
    """
    alpha = overlap(log_p, log_q)
    lam = (-eta * alpha.detach()).exp()
    return lam * kl(log_kept, log_q) + (1 - lam) * (1 - alpha)


def feature(hidden: Tensor, wanted: Tensor) -> Tensor:
    """Return the smooth L1 distance of states [m, D], averaged over D. Source: EAGLE-1."""
    return F.smooth_l1_loss(hidden, wanted, reduction="none").mean(-1)


def confidence(logit: Tensor, alpha: Tensor) -> Tensor:
    """Return the binary cross entropy [m] of sigmoid(logit) against alpha, a probability."""
    return F.binary_cross_entropy_with_logits(logit, alpha, reduction="none")


_CROSS = {"kl", "ce"}  # cross entropies under a law that does not depend on q


class LossSums(NamedTuple):
    """Sums over a batch, one entry a depth [J] float32; `loss` carries the gradient.

    loss holds the depth's weight; the training loss is sum(loss) / sum(weight), where weight is the
    denominator that the settings name.
    agreement counts predictions whose most likely token is the target's over the full vocabulary;
    alpha sums sum_x min(p, q) at temperature 1; both are to be divided by counted.
    """

    loss: Tensor
    weight: Tensor
    alpha: Tensor
    agreement: Tensor
    counted: Tensor


def drafter_loss(
    predictions: Sequence[Prediction],
    batch: Batch,
    teacher: Teacher,
    settings: LossSettings,
    summary: Summary | None = None,
) -> LossSums:
    """Sum the loss of every depth over a batch's supervised positions.

    The target's laws of a chunk of positions are computed once and serve every depth.

    Args:
        predictions: one a depth, positions ascending; those that are not supervised are ignored.
        batch: what they were made from.
        teacher: the target on the drafter's ids.
        settings: which loss.
        summary: of this batch, if it was made before; None: made here.
    """
    made = summary or summarise(batch, teacher.target, settings.temperature, settings.chunk)
    allowed = taught(batch)
    wanted = torch.zeros_like(allowed)
    for prediction in predictions:
        wanted[prediction.positions] = True
    positions = (wanted & allowed).nonzero()[:, 0]
    recompute = torch.is_grad_enabled() and not _fits(predictions, teacher, settings)
    total = torch.zeros(len(LossSums._fields), len(predictions), device=batch.last.device)
    weights = depth_weights(predictions, batch, teacher, settings)

    def sums_over(chunk: Tensor) -> Tensor:
        laws = teacher.laws(batch, made, chunk)
        columns = [
            _depth_sums(_Depth(p, w, batch), laws, teacher, chunk, settings)
            for p, w in zip(predictions, weights, strict=True)
        ]
        return torch.stack(columns, 1)

    for chunk in chunks(positions, settings.chunk):
        total = total + (_run_again(sums_over, chunk) if recompute else sums_over(chunk))
    sums = LossSums(total[0], *total[1:].detach())
    if settings.denominator == "tokens":
        share = batch.ids.numel() / len(predictions)
        return sums._replace(weight=torch.full_like(sums.weight, share))
    return sums._replace(weight=sums.counted) if settings.denominator == "predictions" else sums


def _run_again(function: Callable[[Tensor], Tensor], chunk: Tensor) -> Tensor:
    """Call a function that keeps nothing for the backward pass but runs once more there."""
    return cast(
        "Tensor",
        checkpoint(function, chunk, use_reentrant=False, preserve_rng_state=False),
    )


def _fits(predictions: Sequence[Prediction], teacher: Teacher, settings: LossSettings) -> bool:
    """Tell whether the logits of all predictions may be kept for the backward pass."""
    width = teacher.target.shape.vocab_size if teacher.ids is None else len(teacher.ids)
    values = sum(len(p.positions) for p in predictions) * width
    return values * 4 <= settings.keep_logits_mb * 2**20


class _Depth(NamedTuple):
    """One depth's predictions, their weights [M], and the batch they were made from."""

    prediction: Prediction
    weight: Tensor
    batch: Batch


def _depth_sums(
    depth: _Depth, laws: TeacherLaws, teacher: Teacher, chunk: Tensor, settings: LossSettings
) -> Tensor:
    """Return one depth's sums [fields] over its predictions at the chunk's positions."""
    positions = depth.prediction.positions
    start = int(torch.searchsorted(positions, chunk[0]))
    end = int(torch.searchsorted(positions, chunk[-1], right=True))
    if start == end:
        return torch.zeros(len(LossSums._fields), device=chunk.device)
    row = torch.searchsorted(chunk, positions[start:end])
    logits = depth.prediction.logits(slice(start, end)).float()
    here = chunk[row] == positions[start:end]
    if not bool(here.all()):
        row, logits = row[here], logits[here]
    if len(row) != len(chunk):
        laws = TeacherLaws(*(x[row] for x in laws))
    weight = depth.weight[start:end][here] * _weights(laws, settings)
    rows = _rows(logits, laws, weight, settings)
    loss = rows.loss.sum()
    for other in _others(depth, slice(start, end), here, rows.alpha, settings):
        loss = loss + (weight * other).sum()
    agreement = (teacher.token(rows.guess) == laws.best).float().sum()
    count = torch.full_like(agreement, len(row))
    return torch.stack((loss, weight.sum(), rows.alpha.sum(), agreement, count))


def _others(
    depth: _Depth, span: slice, here: Tensor, alpha: Tensor, settings: LossSettings
) -> list[Tensor]:
    """Return the weighted losses [m] of what a depth predicts beside its law."""
    found: list[Tensor] = []
    for name, source in (("feature", "hidden"), ("confidence", "confidence")):
        coefficient = settings.terms.get(name)
        if coefficient is None:
            continue
        if source not in depth.prediction.auxiliary:
            raise UserError(f"loss.mix has {name}, but this drafter predicts no {source}: drop it")
        value = depth.prediction.auxiliary[source][span][here].float()
        if name == "feature":
            places = depth.prediction.positions[span][here]
            loss = feature(value, depth.batch.last.flatten(0, 1)[places].float())
        else:
            loss = confidence(value, alpha.clamp(0, 1))
        found.append(coefficient * loss)
    return found


def _weights(laws: TeacherLaws, settings: LossSettings) -> Tensor:
    """Return each position's weight [m] before the depth's."""
    weight = torch.ones_like(laws.mass)
    if set(settings.law_terms) == {"ce"}:
        weight = weight * (laws.label_index >= 0)
    if settings.vocabulary_loss == "mask":
        weight = weight * (laws.best_index >= 0)
    return weight


def _rows(logits: Tensor, laws: TeacherLaws, weight: Tensor, settings: LossSettings) -> Rows:
    """Return weighted loss, alpha and guess of every position."""
    best, label = laws.best_index.clamp_min(0), laws.label_index.clamp_min(0)
    soft = (1 - settings.hard) * weight
    hard = settings.hard * weight * (laws.best_index >= 0)
    known = soft * (laws.label_index >= 0)
    if set(settings.law_terms) <= _CROSS:
        goal, constant = _goal(laws, soft, known, settings)
        if settings.hard > 0:
            goal = goal._replace(mass=goal.mass + hard, single=[*goal.single, (best, hard)])
        rows = cross_entropy_rows(logits, goal, laws.plain)
        return rows._replace(loss=rows.loss + constant)

    def formula(z: Tensor, block: slice) -> Tensor:
        log_q = z.log_softmax(-1)
        part = TeacherLaws(*(x[block] for x in laws))
        loss = hard[block] * ce(log_q, best[block])
        for name, coefficient in settings.law_terms.items():
            if name == "ce":
                loss = loss + coefficient * known[block] * ce(log_q, label[block])
            else:
                loss = loss + coefficient * soft[block] * _by_formula(name, part, log_q, settings)
        return loss

    return formula_rows(logits, formula, laws.plain)


def _goal(
    laws: TeacherLaws, soft: Tensor, known: Tensor, settings: LossSettings
) -> tuple[Goal, Tensor]:
    """Return what kl and ce are the cross entropy under, and what kl subtracts of it [m].

    Args:
        laws: of the target.
        soft: [m] the rows' weights.
        known: [m] the same, 0 where the token of the text is outside the vocabulary.
        settings: which of the two, and their weights.
    """
    single: list[tuple[Tensor, Tensor]] = []
    mass = constant = share = torch.zeros_like(soft)
    if "kl" in settings.law_terms:
        weight = settings.law_terms["kl"] * soft
        share = weight if settings.vocabulary_loss == "full" else weight / laws.mass
        mass = share * laws.mass
        constant = share * (laws.entropy - laws.mass * laws.mass.log())
    if "ce" in settings.law_terms:
        weight = settings.law_terms["ce"] * known
        single.append((laws.label_index.clamp_min(0), weight))
        mass = mass + weight
    return Goal(laws.served, share, mass, single), constant


def _by_formula(name: str, laws: TeacherLaws, log_q: Tensor, settings: LossSettings) -> Tensor:
    """Return a soft loss of a block [b]."""
    if name == "tv":
        return tv(laws.log_served, log_q)
    if name == "lk":
        return lk(laws.log_served, log_q)
    kept = laws.log_served - laws.mass.log()[:, None]
    if name == "lk_hybrid":
        return lk_hybrid(laws.log_served, log_q, kept, settings.eta)
    loss = {"kl": kl, "reverse_kl": reverse_kl, "js": js}[name](kept, log_q)
    return laws.mass * loss if settings.vocabulary_loss == "full" else loss

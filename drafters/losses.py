"""Losses of drafters against the target's law.

Owns the pure losses per position and `drafter_loss`, which walks a batch in chunks of positions so
that logits over tokens x vocabulary never exist whole. It knows no drafter: predictions come as
positions and a callable, labels and laws are gathered by position. Dividing by a count is the
caller's business.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from drafters.base import Batch, Prediction
from drafters.errors import UserError
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


_CROSS = ("kl", "ce")  # cross entropies under a law that does not depend on q
KINDS = ("kl", "reverse_kl", "tv", "lk", "lk_hybrid", "ce")
VOCABULARY_LOSSES = ("renormalise", "mask", "full")


@dataclass
class LossSettings:
    """What a drafter is trained on.

    Args:
        kind: kl, reverse_kl, tv, lk, lk_hybrid against the target's law, or ce against
            the token of the text.
        hard: share of a cross entropy against the target's most likely token, 0 to 1.
        temperature: of the target's law; the drafter's law is always that of its plain logits.
        eta: of lk_hybrid.
        decay: weight of depth d is decay ** (d - 1).
        vocabulary_loss: with a reduced vocabulary, renormalise the target's law on it; or mask
            positions whose most likely token is outside, and renormalise; or full: weigh each
            position by the law's mass inside. tv and lk never renormalise.
        chunk: positions whose laws exist at the same time.
        keep_logits_mb: logits up to this size are kept for the backward pass; beyond it every
            chunk is computed again there.
    """

    kind: str = "kl"
    hard: float = 0.0
    temperature: float = 1.0
    eta: float = 3.0
    decay: float = 0.8
    vocabulary_loss: str = "renormalise"
    chunk: int = 512
    keep_logits_mb: int = 1024

    def __post_init__(self) -> None:
        """Check names and ranges."""
        if self.kind not in KINDS:
            raise UserError(f"loss.kind is {self.kind!r}: give {', '.join(KINDS)}")
        if self.vocabulary_loss not in VOCABULARY_LOSSES:
            allowed = ", ".join(VOCABULARY_LOSSES)
            raise UserError(f"loss.vocabulary_loss is {self.vocabulary_loss!r}: give {allowed}")
        if not 0 <= self.hard <= 1:
            raise UserError(f"loss.hard is {self.hard}: give a share from 0 to 1")
        if self.temperature <= 0:
            raise UserError(
                f"loss.temperature is {self.temperature}: give more than 0 (for greedy serving "
                "set loss.hard)"
            )
        if self.decay <= 0 or self.eta <= 0:
            raise UserError(f"loss.decay {self.decay} and loss.eta {self.eta}: give more than 0")
        if self.chunk < 1:
            raise UserError(f"loss.chunk is {self.chunk}: give 1 or more")


class LossSums(NamedTuple):
    """Sums over a batch, one entry a depth [J] float32; `loss` carries the gradient.

    loss and weight hold the depth's weight; the training loss is sum(loss) / sum(weight).
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

    def sums_over(chunk: Tensor) -> Tensor:
        laws = teacher.laws(batch, made, chunk)
        columns = [_depth_sums(p, laws, teacher, chunk, settings) for p in predictions]
        return torch.stack(columns, 1)

    for chunk in chunks(positions, settings.chunk):
        total = total + (_run_again(sums_over, chunk) if recompute else sums_over(chunk))
    return LossSums(total[0], *total[1:].detach())


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


def _depth_sums(
    prediction: Prediction,
    laws: TeacherLaws,
    teacher: Teacher,
    chunk: Tensor,
    settings: LossSettings,
) -> Tensor:
    """Return one depth's sums [fields] over its predictions at the chunk's positions."""
    positions = prediction.positions
    start = int(torch.searchsorted(positions, chunk[0]))
    end = int(torch.searchsorted(positions, chunk[-1], right=True))
    if start == end:
        return torch.zeros(len(LossSums._fields), device=chunk.device)
    span = positions[start:end]
    row = torch.searchsorted(chunk, span)
    logits = prediction.logits(slice(start, end)).float()
    here = chunk[row] == span
    if not bool(here.all()):
        row, logits = row[here], logits[here]
    if len(row) != len(chunk):
        laws = TeacherLaws(*(x[row] for x in laws))
    weight = settings.decay ** (prediction.depth - 1) * _weights(laws, settings)
    rows = _rows(logits, laws, weight, settings)
    agreement = (teacher.token(rows.guess) == laws.best).float().sum()
    count = torch.full_like(agreement, len(row))
    return torch.stack((rows.loss.sum(), weight.sum(), rows.alpha.sum(), agreement, count))


def _weights(laws: TeacherLaws, settings: LossSettings) -> Tensor:
    """Return each position's weight [m] before the depth's."""
    weight = torch.ones_like(laws.mass)
    if settings.kind == "ce":
        weight = weight * (laws.label_index >= 0)
    if settings.vocabulary_loss == "mask":
        weight = weight * (laws.best_index >= 0)
    return weight


def _rows(logits: Tensor, laws: TeacherLaws, weight: Tensor, settings: LossSettings) -> Rows:
    """Return weighted loss, alpha and guess of every position."""
    best = laws.best_index.clamp_min(0)
    soft = (1 - settings.hard) * weight
    hard = settings.hard * weight * (laws.best_index >= 0)
    if settings.kind in _CROSS:
        goal, constant = _goal(laws, soft, settings)
        if settings.hard > 0:
            goal = goal._replace(mass=goal.mass + hard, single=[*goal.single, (best, hard)])
        rows = cross_entropy_rows(logits, goal, laws.plain)
        return rows._replace(loss=rows.loss + constant)

    def formula(z: Tensor, block: slice) -> Tensor:
        log_q = z.log_softmax(-1)
        loss = _by_formula(TeacherLaws(*(x[block] for x in laws)), log_q, settings)
        return soft[block] * loss + hard[block] * ce(log_q, best[block])

    return formula_rows(logits, formula, laws.plain)


def _goal(laws: TeacherLaws, weight: Tensor, settings: LossSettings) -> tuple[Goal, Tensor]:
    """Return what kl or ce is the cross entropy under, and what kl subtracts of it [m]."""
    none = torch.zeros_like(weight)
    if settings.kind == "ce":
        label = laws.label_index.clamp_min(0), weight
        return Goal(laws.served, none, weight, [label]), none
    share = weight if settings.vocabulary_loss == "full" else weight / laws.mass
    goal = Goal(laws.served, share, share * laws.mass, [])
    return goal, share * (laws.entropy - laws.mass * laws.mass.log())


def _by_formula(laws: TeacherLaws, log_q: Tensor, settings: LossSettings) -> Tensor:
    """Return the soft loss of a block [b]."""
    if settings.kind == "tv":
        return tv(laws.log_served, log_q)
    if settings.kind == "lk":
        return lk(laws.log_served, log_q)
    kept = laws.log_served - laws.mass.log()[:, None]
    if settings.kind == "lk_hybrid":
        return lk_hybrid(laws.log_served, log_q, kept, settings.eta)
    loss = reverse_kl(kept, log_q)
    return laws.mass * loss if settings.vocabulary_loss == "full" else loss

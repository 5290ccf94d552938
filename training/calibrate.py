"""Calibrate: let a drafter's confidence tell what is accepted on chats it does not learn from."""

import torch
from torch import Tensor

from drafters.losses import overlap
from drafters.teacher import chunks
from training.features import Lesson, Lessons
from training.objective import Objective

_CONFIDENCE = "confidence"


@torch.no_grad()
def calibrate(objective: Objective, lessons: Lessons) -> None:
    """Fit a drafter that predicts its own confidence; others stay as they are."""
    chains: list[tuple[Tensor, Tensor]] = []
    for index in range(len(lessons)):
        chain = _chains(objective, lessons[index])
        if chain is None:
            return
        chains += [chain] if len(chain[0]) else []
    if chains:
        confidence, taken = (torch.cat(parts) for parts in zip(*chains, strict=True))
        objective.drafter.calibrate(confidence, taken)


def _chains(objective: Objective, lesson: Lesson) -> tuple[Tensor, Tensor] | None:
    """Return confidence and alpha [N, K] of chains that reach every depth; None: it states none."""
    batch, teacher = lesson.batch, objective.teacher
    predictions = objective.drafted(objective.drafter.predict(batch, objective.target))
    if any(_CONFIDENCE not in prediction.auxiliary for prediction in predictions):
        return None
    whole = predictions[-1].group
    confidence: list[Tensor] = []
    taken: list[Tensor] = []
    for prediction in predictions:
        place = torch.searchsorted(prediction.group, whole)
        confidence.append(prediction.auxiliary[_CONFIDENCE][place].float())
        shares = whole.new_zeros(len(prediction.group), dtype=torch.float32)
        for piece in chunks(torch.arange(len(shares)), objective.settings.chunk):
            span = slice(int(piece[0]), int(piece[-1]) + 1)
            laws = teacher.laws(batch, lesson.summary, prediction.positions[span])
            log_q = prediction.logits(span).float().log_softmax(-1)
            shares[span] = overlap(laws.plain.log(), log_q)
        taken.append(shares[place])
    return torch.stack(confidence, 1), torch.stack(taken, 1)

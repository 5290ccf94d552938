"""Weights over the depths of what a drafter predicts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.base import Batch, Prediction
from drafters.loss_settings import LossSettings
from drafters.teacher import Teacher, chunks, taught


def depth_weights(
    predictions: Sequence[Prediction], batch: Batch, teacher: Teacher, settings: LossSettings
) -> list[Tensor]:
    """Return the weights [M] float32 of every depth's predictions, in their order."""
    if settings.depth_weights == "dpace":
        return _dpace_weights(predictions, batch, teacher, settings)
    powers = [settings.decay ** (prediction.depth - 1) for prediction in predictions]
    if settings.depth_weights == "normalised":
        powers = [power / sum(powers) for power in powers]
    device = batch.ids.device
    return [
        torch.full((len(prediction.positions),), power, device=device)
        for prediction, power in zip(predictions, powers, strict=True)
    ]


def dpace(confidence: Tensor, valid: Tensor, smoothing: float) -> Tensor:
    """Return what each depth adds to the smoothed expected accepted length.

    With s = (1 - smoothing) c + smoothing and R_k = s_1 .. s_k, W_k = R_k + R_(k+1) + .. : the
    slope of the sum of R with respect to log s_k.

    Args:
        confidence: [G, K] the drafter's probability of the right token, depth by depth.
        valid: [G, K] bool; others count as s = 1 and add nothing.
        smoothing: 0 to 1.

    Returns:
        [G, K]; 0 where not valid.

    Source: D-PACE (arXiv 2605.18810).

    >>> every = torch.ones(1, 3, dtype=torch.bool)
    >>> [round(x, 4) for x in dpace(torch.tensor([[0.9, 0.5, 0.2]]), every, 0.5)[0].tolist()]
    [2.09, 1.14, 0.4275]
    """
    smooth = ((1 - smoothing) * confidence + smoothing).where(valid, 1.0)
    reach = smooth.cumprod(1) * valid
    return reach.flip(1).cumsum(1).flip(1) * valid


@torch.no_grad()
def _dpace_weights(
    predictions: Sequence[Prediction], batch: Batch, teacher: Teacher, settings: LossSettings
) -> list[Tensor]:
    groups, index = torch.cat([p.group for p in predictions]).unique(return_inverse=True)
    shape = len(groups), len(predictions)
    confidence = torch.zeros(shape, device=batch.ids.device)
    valid = torch.zeros(shape, dtype=torch.bool, device=batch.ids.device)
    allowed, labels = taught(batch), batch.ids.flatten()
    rows = index.split([len(p.group) for p in predictions])
    for column, prediction in enumerate(predictions):
        valid[rows[column], column] = allowed[prediction.positions]
        for span in chunks(torch.arange(len(prediction.positions)), settings.chunk):
            place = slice(int(span[0]), int(span[-1]) + 1)
            label = teacher.index(labels[(prediction.positions[place] + 1) % len(labels)])
            law = prediction.logits(place).float().softmax(-1)
            right = law.gather(-1, label.clamp_min(0)[:, None])[:, 0]
            confidence[rows[column][place], column] = right * (label >= 0)
    weights = dpace(confidence, valid, settings.smoothing)
    return [weights[rows[column], column] for column in range(len(predictions))]

"""The one alignment between what a drafter reads and the token it predicts.

A prediction made `ahead` tokens after index i has the label ids[i + ahead] and imitates the
target's law at position i + ahead - 1. There are no other shifts.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from drafters.base import Batch, Prediction


def supervised(batch: Batch, ahead: int) -> Tensor:
    """Tell which indices have a supervised label `ahead` tokens later.

    Args:
        batch: whose labels are asked for.
        ahead: 1 or more; 2 for the first token that a drafter guesses beside the target.

    Returns:
        [B, T] bool; True at i if token i + ahead exists, belongs to i's document and is supervised.
    """
    result = torch.zeros_like(batch.label_mask)
    document = batch.document
    if ahead < document.shape[1]:
        same = (document[:, ahead:] == document[:, :-ahead]) & (document[:, ahead:] >= 0)
        result[:, :-ahead] = same & batch.label_mask[:, ahead:]
    return result


def useful_slots(batch: Batch, steps: range) -> Tensor:
    """Return the slots [B, T'] with a label at one of these steps, filled up with others.

    The slot of index i at step s predicts position i + s + 1.
    """
    useful = torch.stack([supervised(batch, step + 2) for step in steps]).any(0)
    width = max(1, int(useful.sum(1).max()))
    return useful.byte().argsort(dim=1, descending=True, stable=True)[:, :width]


def slot_prediction(
    batch: Batch,
    slots: Tensor,
    step: int,
    state: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    among: Tensor | None = None,
    hidden: bool = False,
) -> Prediction:
    """Return what slots predict at a step, where a label is supervised.

    Args:
        batch: whose labels are predicted.
        slots: [B, T'] indices into the rows.
        step: from 0; see useful_slots.
        state: [B, T', D] of the slots.
        head: maps states [m, D] to draft logits [m, K].
        among: [B, T] bool, the slots that count; None: all.
        hidden: whether the states imitate the target's post-norm ones, so that a loss may ask.
    """
    rows, length = batch.ids.shape
    first = torch.arange(rows, device=slots.device)[:, None] * length
    labelled = supervised(batch, step + 2)
    wanted = labelled if among is None else labelled & among
    chosen = wanted.gather(1, slots).flatten().nonzero()[:, 0]
    group = (first + slots).flatten()[chosen]
    own = state.flatten(0, 1)[chosen]
    logits = partial(_logits, head, own)
    auxiliary = {"hidden": own} if hidden else {}
    return Prediction(group + step + 1, step + 1, group, logits, auxiliary)


def _logits(head: Callable[[Tensor], Tensor], state: Tensor, span: slice) -> Tensor:
    return head(state[span])

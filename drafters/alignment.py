"""The one alignment between what a drafter reads and the token it predicts.

A prediction made `ahead` tokens after index i has the label ids[i + ahead] and imitates the
target's law at position i + ahead - 1. There are no other shifts.
"""

import torch
from torch import Tensor

from drafters.base import Batch


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

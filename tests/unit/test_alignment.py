"""Which indices have a supervised label some tokens later."""

import torch

from drafters.alignment import supervised
from drafters.base import Batch


def batch_of(label_mask: list[list[int]], document: list[list[int]]) -> Batch:
    mask = torch.tensor(label_mask, dtype=torch.bool)
    ids = torch.zeros_like(mask, dtype=torch.int64)
    return Batch(ids, mask, torch.tensor(document), ids, None, torch.zeros(*mask.shape, 1))


def test_labels_stay_inside_the_sequence_and_the_document() -> None:
    batch = batch_of([[0, 0, 1, 1, 1, 1, 1, 1]], [[0, 0, 0, 0, 1, 1, 1, -1]])
    # label index = i + ahead; index 7 is padding although its mask says otherwise
    assert supervised(batch, 1).int().tolist() == [[0, 1, 1, 0, 1, 1, 0, 0]]
    assert supervised(batch, 2).int().tolist() == [[1, 1, 0, 0, 1, 0, 0, 0]]
    assert supervised(batch, 3).int().tolist() == [[1, 0, 0, 0, 0, 0, 0, 0]]
    assert not supervised(batch, 8).any()
    assert not supervised(batch, 20).any()


def test_padding_is_no_document_of_its_own() -> None:
    batch = batch_of([[1, 1, 1, 1]], [[0, -1, -1, -1]])
    assert not supervised(batch, 1).any()

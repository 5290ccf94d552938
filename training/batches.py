"""Batches: which examples go through together, in what order, and as what tensors.

Examples of like length share a batch, so that little is padding. The composition is made once and
kept over the epochs, only the order changes: a batch's features can then be kept as they are, and
a resumed run meets the very batches of the run it goes on with.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from training.examples import Example

_POOL = 32  # batches whose examples are sorted by length together


def compose(lengths: Sequence[int], batch_tokens: int, seed: int) -> list[list[int]]:
    """Put examples of like length together.

    Args:
        lengths: tokens of each example.
        batch_tokens: largest number of tokens of a batch, padding included; a longer example
            makes a batch of its own.
        seed: of the shuffle before the sort.

    Returns:
        Indices of the examples, batch by batch; every example once.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches: list[list[int]] = []
    pool: list[int] = []
    held = 0
    for index in order:
        pool.append(index)
        held += lengths[index]
        if held >= _POOL * batch_tokens:
            batches += _cut(pool, lengths, batch_tokens)
            pool, held = [], 0
    return batches + _cut(pool, lengths, batch_tokens)


def _cut(pool: list[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    current: list[int] = []
    for index in sorted(pool, key=lambda i: (lengths[i], i)):
        if current and (len(current) + 1) * lengths[index] > batch_tokens:
            batches.append(current)
            current = []
        current.append(index)
    return [*batches, current] if current else batches


def order_of(count: int, seed: int, epoch: int) -> list[int]:
    """Return the order of `count` batches in an epoch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator).tolist()


def pad(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lay examples out as rows.

    Returns:
        ids, label_mask, document, position [B, T]; documents are numbered through all rows, -1 is
        padding; positions start afresh with every document.
    """
    shape = len(examples), max(len(example) for example in examples)
    ids = torch.zeros(shape, dtype=torch.int64)
    label_mask = torch.zeros(shape, dtype=torch.bool)
    document = torch.full(shape, -1)
    position = torch.arange(shape[1]).expand(shape).contiguous()
    count = 0
    for row, example in enumerate(examples):
        ids[row, : len(example)] = example.ids
        label_mask[row, : len(example)] = example.label_mask
        start = 0
        for length in example.documents or (len(example),):
            document[row, start : start + length] = count
            position[row, start : start + length] = torch.arange(length)
            start, count = start + length, count + 1
    return ids, label_mask, document, position

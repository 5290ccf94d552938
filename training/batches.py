"""Batches: which examples go through together, in what order, and as what tensors.

Examples of like length share a batch, so that little is padding. The composition is made once and
kept over the epochs, only the order changes: a batch's features can then be kept as they are, and
a resumed run meets the very batches of the run it goes on with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from training.examples import Example

_POOL = 32  # batches whose examples are sorted by length together


@dataclass(frozen=True)
class Document:
    """One chat of a batch, which reads itself alone.

    Args:
        row, start: where its first token lies.
        ids: [n] int64.
        label_mask: [n] bool; the first entry does not count, no law is before it.
    """

    row: int
    start: int
    ids: Tensor
    label_mask: Tensor

    @property
    def needed(self) -> int:
        """Return how many tokens, from the first on, stand before the last label."""
        labels = self.label_mask.nonzero()[:, 0]
        return int(labels[-1]) if len(labels) else 0

    @property
    def key(self) -> str:
        """Return a digest of what it says and what of it is learned."""
        digest = blake2b(self.ids.numpy().tobytes(), digest_size=16)
        digest.update(self.label_mask[1:].numpy().tobytes())
        return digest.hexdigest()


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
    for number, chat in enumerate(documents(examples)):
        span = chat.row, slice(chat.start, chat.start + len(chat.ids))
        ids[span], label_mask[span] = chat.ids, chat.label_mask
        document[span] = number
        position[span] = torch.arange(len(chat.ids))
    return ids, label_mask, document, position


def documents(examples: Sequence[Example]) -> Iterator[Document]:
    """Yield the documents of examples, in the order in which `pad` numbers them."""
    for row, example in enumerate(examples):
        start = 0
        for length in example.documents or (len(example),):
            span = slice(start, start + length)
            yield Document(row, start, example.ids[span], example.label_mask[span])
            start += length

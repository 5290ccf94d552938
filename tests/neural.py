"""Neural drafters for tests: away from their special starting points, with batches and commits."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from drafters.base import Batch, Commit, NeuralDrafter
from drafters.reduced import ReducedDrafter
from drafters.sampling import RowRandom
from drafters.target import Target
from drafters.tree import TokenTree

Family = TypeVar("Family", bound=ReducedDrafter[Any])


def away(family: type[Family], target: Target, distance: float, **options: object) -> Family:
    """Build a drafter some way from every special starting point, on ids chosen at random."""
    torch.manual_seed(3)
    drafter = family.build(options, target.shape)
    size = drafter.vocabulary.size
    if size:
        drafter.vocabulary.keep(torch.randperm(128)[:size].sort().values)
    drafter.init_from(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(distance * torch.randn_like(parameter))
    return drafter.eval()


def batch_of(
    target: Target, drafter: NeuralDrafter, ids: Tensor, document: Tensor | None = None
) -> Batch:
    """Make a batch with every token supervised; documents lie side by side."""
    document = torch.zeros_like(ids) if document is None else document
    same = document[:, :, None] == document[:, None, :]
    position = (same & torch.ones_like(same).tril()).sum(-1) - 1
    taps, last = target.forward_batch(ids, document, position, drafter.features)
    return Batch(ids, document >= 0, document, position, taps, last)


def commits_of(batch: Batch, lengths: Sequence[int], start: int = 0) -> list[Commit]:
    """Commit tokens start..length-1 of each row, as a prefill or as one round's accepted path."""
    commits = []
    for row, length in enumerate(lengths):
        inputs, root = batch.ids[row, start:length], int(batch.ids[row, length])
        tree = TokenTree.chain(inputs) if start else None
        taps = None if batch.taps is None else batch.taps[row, start:length]
        last = batch.last[row, start:length] if taps is None else None
        commits.append(Commit(inputs, root, taps=taps, last=last, tree=tree))
    return commits


def randoms(count: int) -> list[RowRandom]:
    """Return the coins of so many rows."""
    return [RowRandom(0, row) for row in range(count)]

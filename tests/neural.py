"""Neural drafters for tests: away from their special starting points, with batches and commits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from drafters.base import Batch, Commit, Drafter, NeuralDrafter
from drafters.growth import Growth
from drafters.reduced import ReducedDrafter
from drafters.sampling import RowRandom
from drafters.target import Target
from drafters.tree import TokenTree
from inference import generate
from tests.forced import by_slot
from tests.tiny import prompts_of

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


def learn(
    drafter: NeuralDrafter, target: Target, batch: Batch, steps: int, rate: float
) -> list[float]:
    """Fit the batch's tokens by cross entropy; return the losses, summed over depths."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate, weight_decay=0.0)
    labels = batch.ids.flatten()
    losses: list[float] = []
    drafter.train()
    for _ in range(steps):
        loss = torch.zeros(())
        for prediction in drafter.predict(batch, target):
            label = labels[prediction.positions + 1]
            logits = prediction.logits(slice(0, len(label)))
            loss = loss + torch.nn.functional.cross_entropy(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    drafter.eval()
    return losses


def check_accepted(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    growth: Growth,
    least: float,
) -> None:
    """Outputs are the given texts, and tau is above `least`."""
    tokens = len(texts[0])
    outputs = generate(target, drafter, prompts, growth=growth, max_new_tokens=tokens)
    assert [o.ids for o in outputs] == texts
    assert sum(len(o.ids) - 1 for o in outputs) / sum(o.rounds for o in outputs) > least


def check_every_label_is_predicted_once(target: Target, drafter: NeuralDrafter) -> None:
    """Depth d at slot t predicts token t + d + 1 where that is supervised and of its document."""
    ids = torch.tensor(prompts_of(10, 10))
    document = torch.tensor([[0] * 10, [1] * 4 + [2] * 5 + [-1]])
    batch = batch_of(target, drafter, ids, document)
    batch.label_mask[0, :6] = False
    for ahead, prediction in enumerate(drafter.predict(batch, target), start=2):
        expected = [
            row * 10 + slot
            for row in range(2)
            for slot in range(10 - ahead)
            if document[row, slot] == document[row, slot + ahead]
            and batch.label_mask[row, slot + ahead]
        ]
        assert prediction.group.tolist() == expected
        assert torch.equal(prediction.positions, prediction.group + ahead - 1)


def check_later_tokens_change_nothing(target: Target, drafter: NeuralDrafter) -> None:
    """Slot t at step j reads tokens up to t + 1 + j alone, and that one too."""
    ids = torch.tensor(prompts_of(14))
    batch = batch_of(target, drafter, ids)
    before = by_slot(drafter.predict(batch, target))
    cut = 8
    changed = ids.clone()
    changed[0, cut:] = (changed[0, cut:] + 1) % 128
    # states as they were, so that only the drafter's own reading of tokens is seen
    after = by_slot(drafter.predict(replace(batch, ids=changed), target))
    for (step, slot), logits in before.items():
        same = torch.allclose(logits, after[step, slot], atol=1e-5)
        assert same == (slot + 1 + step < cut), (step, slot)


def check_documents_do_not_see_each_other(target: Target, drafter: NeuralDrafter) -> None:
    """Two texts packed into a row are predicted as each alone."""
    first, second = prompts_of(9, 7)
    ids, document = torch.tensor([first + second]), torch.tensor([[0] * 9 + [1] * 7])
    packed = by_slot(drafter.predict(batch_of(target, drafter, ids, document), target))
    alone = [
        by_slot(drafter.predict(batch_of(target, drafter, torch.tensor([text])), target))
        for text in (first, second)
    ]
    assert len(packed) == len(alone[0]) + len(alone[1])
    for (step, slot), logits in packed.items():
        expected = alone[0][step, slot] if slot < 9 else alone[1][step, slot - 9]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)

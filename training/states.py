"""States: what the target made of one document, apart from the batch it went through in.

They end before the document's last label: what comes later is never learned from, nor read by what
is. Batches are laid out from them in one way, wherever they come from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafters.base import Batch
from drafters.target import Target
from drafters.teacher import Summary, summarise
from training.batches import documents, pad
from training.examples import Example


@dataclass(frozen=True)
class States:
    """The target's states over the first n tokens of a document.

    Args:
        taps: [n, K * D] raw layer outputs, or None.
        last: [n, D] post-norm states, in the same dtype.
        normaliser: [n] float32, of the law that `last` gives at temperature 1 (see Summary).
        best: [n] int32, its most likely token; both are 0 where nothing is learned.
    """

    taps: Tensor | None
    last: Tensor
    normaliser: Tensor
    best: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "States":
        """Make states of their tensors by name."""
        return cls(tensors.get("taps"), tensors["last"], tensors["normaliser"], tensors["best"])

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def size(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def columns(self, index: Tensor | None) -> "States":
        """Return the states with these columns of the taps alone; None: without taps."""
        taps = None if index is None or self.taps is None else self.taps[:, index]
        return States(taps, self.last, self.normaliser, self.best)


def cut(examples: Sequence[Example], batch: Batch, summary: Summary) -> list[States]:
    """Return the states of every document of a batch; views of its tensors."""
    normaliser, best = (x.view(batch.ids.shape) for x in (summary.normaliser, summary.best))
    found: list[States] = []
    for chat in documents(examples):
        span = chat.row, slice(chat.start, chat.start + chat.needed)
        taps = None if batch.taps is None else batch.taps[span]
        found.append(States(taps, batch.last[span], normaliser[span], best[span].int()))
    return found


def with_summary(
    example: Example, taps: Tensor | None, last: Tensor, target: Target, chunk: int = 256
) -> States:
    """Return the states of one document that the target went through while it wrote it.

    Args:
        example: the document.
        taps: [m, K * D], or None.
        last: [m, D]; m tokens are all that is needed, or more.
        target: whose head gives the summary.
        chunk: positions whose logits exist at the same time.
    """
    ids, label_mask, document, position = (x.to(target.device) for x in pad([example]))
    states = _empty(last, ids)
    states[0, : len(last)] = last
    batch = Batch(ids, label_mask, document, position, None, states)
    (found,) = cut([example], batch, summarise(batch, target, 1.0, chunk))
    return replace(found, taps=None if taps is None else taps[: len(found.last)])


def lay_out(
    examples: Sequence[Example], states: Sequence[States], device: torch.device
) -> tuple[Batch, Summary]:
    """Make the batch of examples from the states of their documents.

    Args:
        examples: one a row.
        states: of all their documents, in order.
        device: where the batch goes.

    Returns:
        The batch in the states' dtype, zero where there are none, and the summary at temperature 1.
    """
    ids, label_mask, document, position = (x.to(device) for x in pad(examples))
    last = _empty(states[0].last, ids)
    taps = None if states[0].taps is None else _empty(states[0].taps, ids)
    normaliser = torch.zeros(ids.shape, device=device)
    best = torch.zeros_like(ids)
    for chat, own in zip(documents(examples), states, strict=True):
        span = chat.row, slice(chat.start, chat.start + chat.needed)
        last[span], normaliser[span], best[span] = own.last, own.normaliser, own.best
        if taps is not None and own.taps is not None:
            taps[span] = own.taps
    flat = normaliser.flatten()
    batch = Batch(ids, label_mask, document, position, taps, last)
    return batch, Summary(flat, flat, best.flatten())


def _empty(like: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(*ids.shape, like.shape[-1], dtype=like.dtype, device=ids.device)

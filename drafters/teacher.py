"""Teacher: the target's laws at a batch's positions, on a drafter's ids.

The head over the full vocabulary is the dear part (49152 x 576 on the embedded target, more than a
whole drafter step), and all that is needed of it beyond the drafter's own ids is a normaliser and
the most likely token: a Summary holds these, is made once a position, serves every depth, and
every later epoch where batches are kept.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.alignment import supervised
from drafters.base import Batch
from drafters.target import Target

_LEAST = torch.finfo(torch.float32).min  # p log p of p = 0 is 0, not 0 * -inf


class Summary(NamedTuple):
    """The target's full-vocabulary laws at the positions of a batch, as far as they are reused.

    normaliser, tempered: [N] float32, log of the sum of exp(logits) and of exp(logits /
    temperature); best: [N] int64, most likely token. N = B * T; zero where nothing is supervised.
    """

    normaliser: Tensor
    tempered: Tensor
    best: Tensor


class TeacherLaws(NamedTuple):
    """The target's laws at m positions on the drafter's ids, and what is right there.

    log_served, served: [m, K] at the loss's temperature, not renormalised.
    plain: [m, K] at temperature 1, not renormalised; the same tensor if that is the temperature.
    mass: [m] of the served law on the K ids; entropy: [m] sum of p log p over them.
    best: [m] most likely token of all; best_index, label_index: [m] places of it and of the next
    token among the K ids, -1 outside.
    """

    log_served: Tensor
    served: Tensor
    plain: Tensor
    mass: Tensor
    entropy: Tensor
    best: Tensor
    best_index: Tensor
    label_index: Tensor


def taught(batch: Batch) -> Tensor:
    """Return [N] bool over flat positions: whether the law after each token is to be imitated."""
    return supervised(batch, 1).flatten()


@torch.no_grad()
def summarise(batch: Batch, target: Target, temperature: float, chunk_size: int) -> Summary:
    """Run the target's head over the full vocabulary once for every supervised position.

    Args:
        batch: whose `last` is read.
        target: the teacher.
        temperature: of `tempered`.
        chunk_size: positions whose logits exist at the same time.
    """
    last = batch.last.flatten(0, 1)
    normaliser = torch.zeros(len(last), device=last.device)
    tempered = torch.zeros_like(normaliser)
    best = torch.zeros(len(last), dtype=torch.int64, device=last.device)
    with torch.autocast(last.device.type, enabled=False):
        for chunk in chunks(taught(batch).nonzero()[:, 0], chunk_size):
            logits = target.head(last[chunk].to(target.dtype)).float()
            best[chunk] = logits.argmax(-1)
            normaliser[chunk] = logits.logsumexp(-1)
            if temperature != 1:
                tempered[chunk] = (logits / temperature).logsumexp(-1)
    return Summary(normaliser, tempered if temperature != 1 else normaliser, best)


class Teacher:
    """The target's laws on a drafter's ids.

    Args:
        target: the teacher.
        ids: [K] the drafter's vocabulary, ascending; None: the target's own.
        temperature: of the served laws.
    """

    def __init__(self, target: Target, ids: Tensor | None, temperature: float = 1.0) -> None:
        """Index the ids."""
        self.target, self.ids, self.temperature = target, ids, temperature
        self._index: Tensor | None = None
        if ids is not None:
            self._index = torch.full((target.shape.vocab_size,), -1, device=ids.device)
            self._index[ids] = torch.arange(len(ids), device=ids.device)

    def index(self, tokens: Tensor) -> Tensor:
        """Return the tokens' places among the drafter's ids, -1 outside."""
        return tokens if self._index is None else self._index[tokens]

    def token(self, index: Tensor) -> Tensor:
        """Return the tokens at these places."""
        return index if self.ids is None else self.ids[index]

    @torch.no_grad()
    def laws(self, batch: Batch, summary: Summary, positions: Tensor) -> TeacherLaws:
        """Return the laws after the tokens at flat positions [m], all supervised."""
        last = batch.last.flatten(0, 1)[positions].to(self.target.dtype)
        with torch.autocast(last.device.type, enabled=False):
            logits = self.target.head(last, self.ids).float()
        log_served = logits / self.temperature - summary.tempered[positions][:, None]
        served = log_served.exp()
        plain = served
        if self.temperature != 1:
            plain = (logits - summary.normaliser[positions][:, None]).exp()
        best = summary.best[positions]
        label = batch.ids.flatten()[positions + 1]
        return TeacherLaws(
            log_served,
            served,
            plain,
            served.sum(-1).clamp_min(torch.finfo(served.dtype).tiny),
            torch.linalg.vecdot(served, log_served.clamp_min(_LEAST)),
            best,
            self.index(best),
            self.index(label),
        )


def chunks(positions: Tensor, size: int) -> Iterator[Tensor]:
    """Cut positions into pieces of at most `size`."""
    for start in range(0, len(positions), size):
        yield positions[start : start + size]

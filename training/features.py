"""Features: training batches with the target's states, computed once or every time.

A Lesson is what a drafter sees of some examples: a Batch (its states rounded to the stored dtype)
and the Summary of the target's laws. Kept lessons save the target's forward and its head over the
full vocabulary in later epochs, which is more than half of a step's work on the embedded target.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from drafters.base import Batch, Features
from drafters.errors import UserError
from drafters.losses import LossSettings
from drafters.target import Target
from drafters.teacher import Summary, summarise
from training.batches import pad
from training.examples import Example
from training.options import FeatureSettings

_SHARE = 4  # features may take one part in so many of the free memory before `auto` keeps none
_FLOATS_A_TOKEN = 12  # rows of the target's width alive in its forward, beside MLP and logits


@dataclass(frozen=True)
class Lesson:
    """A batch, and the target's laws over it as far as they are reused.

    Args:
        batch: float32 states of the target.
        summary: normalisers and most likely tokens of the full-vocabulary laws.
        tokens: of the batch, padding apart.
    """

    batch: Batch
    summary: Summary
    tokens: int


class Lessons:
    """The lessons of fixed groups of examples.

    Args:
        examples: all of them.
        groups: indices of the examples of each lesson.
        target: whose states are taught.
        features: what the drafter reads.
        settings: what is kept and how it is rounded; `auto` must be decided (see `decide`).
        loss: temperature and chunk of the summary.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        groups: Sequence[Sequence[int]],
        *,
        target: Target,
        features: Features,
        settings: FeatureSettings,
        loss: LossSettings,
    ) -> None:
        """Keep the parts; nothing is computed yet."""
        self.examples, self.groups = examples, groups
        self.target, self.features, self.settings, self.loss = target, features, settings, loss
        self._kept: dict[int, Lesson] = {}

    def __len__(self) -> int:
        """Return the number of lessons."""
        return len(self.groups)

    def __getitem__(self, index: int) -> Lesson:
        """Return a lesson with float32 states."""
        lesson = self._kept.get(index)
        if lesson is None:
            lesson = self.make(index)
            if self.settings.keep == "memory":
                self._kept[index] = lesson
        return _widened(lesson)

    def make(self, index: int) -> Lesson:
        """Run the target over a lesson's examples; states in the stored dtype."""
        return self._make([self.examples[i] for i in self.groups[index]])

    def lesson_of(self, examples: Sequence[Example]) -> Lesson:
        """Return a lesson of any examples, with float32 states, as those of the groups are made."""
        return _widened(self._make(examples))

    def _make(self, examples: Sequence[Example]) -> Lesson:
        stored = getattr(torch, self.settings.dtype)
        ids, label_mask, document, position = (x.to(self.target.device) for x in pad(examples))
        taps, last = self.target.forward_batch(ids, document, position, self.features)
        taps = None if taps is None else taps.to(stored)
        batch = Batch(ids, label_mask, document, position, taps, last.to(stored))
        summary = summarise(batch, self.target, self.loss.temperature, self.loss.chunk)
        return Lesson(batch, summary, sum(len(example) for example in examples))


def decide(settings: FeatureSettings, needed: int, free: int | None = None) -> FeatureSettings:
    """Resolve `auto`, and refuse to keep what does not fit.

    Args:
        settings: as given.
        needed: bytes of all features (see `stored_bytes`).
        free: bytes of free memory; None asks the machine.

    Raises:
        UserError: features.keep is memory and they do not fit; says how much they need.
    """
    free = psutil.virtual_memory().available if free is None else free
    if settings.keep == "auto":
        keep = "memory" if needed * _SHARE <= free else "none"
        return FeatureSettings(keep, settings.dtype)
    if settings.keep == "memory" and needed > free:
        raise UserError(
            f"features.keep=memory needs {_gb(needed)} and {_gb(free)} are free: give "
            "features.dtype=bfloat16 (half), features.keep=none, or less data"
        )
    return settings


def stored_bytes(
    lengths: Sequence[int],
    groups: Sequence[Sequence[int]],
    width: int,
    settings: FeatureSettings,
) -> int:
    """Return the bytes of all lessons; `width` is the number of values kept of a token."""
    padded = sum(len(group) * max(lengths[i] for i in group) for group in groups)
    return padded * width * getattr(torch, settings.dtype).itemsize


def bytes_kept(lessons: Lessons) -> int:
    """Return the bytes that lessons take once all of them are kept."""
    if lessons.settings.keep != "memory":
        return 0
    lengths = [len(example) for example in lessons.examples]
    width = (len(lessons.features.layers) + 1) * lessons.target.shape.hidden_size
    return stored_bytes(lengths, lessons.groups, width, lessons.settings)


def check_batch_fits(
    lengths: Sequence[int],
    groups: Sequence[Sequence[int]],
    target: Target,
    loss: LossSettings,
    free: int | None = None,
) -> None:
    """Refuse batches that the target's forward cannot hold.

    Counts the forward's widest states, its attention mask, and one chunk of logits, in the
    target's dtype; an estimate from below.

    Raises:
        UserError: says how much the largest batch needs and what to lower.
    """
    free = psutil.virtual_memory().available if free is None else free
    shape = target.shape
    wide = _FLOATS_A_TOKEN * shape.hidden_size + 3 * shape.intermediate_size
    needed = 0
    for group in groups:
        length = max(lengths[i] for i in group)
        states = len(group) * length * (wide + length)
        logits = min(loss.chunk, len(group) * length) * shape.vocab_size * 2
        needed = max(needed, (states + logits) * target.dtype.itemsize)
    if needed > free:
        raise UserError(
            f"a batch needs about {_gb(needed)} of memory and {_gb(free)} are free: lower "
            "data.batch_tokens, data.max_length or loss.chunk"
        )


def _widened(lesson: Lesson) -> Lesson:
    batch = lesson.batch
    if batch.last.dtype == torch.float32:
        return lesson
    taps: Tensor | None = None if batch.taps is None else batch.taps.float()
    wide = Batch(
        batch.ids, batch.label_mask, batch.document, batch.position, taps, batch.last.float()
    )
    return Lesson(wide, lesson.summary, lesson.tokens)


def _gb(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"

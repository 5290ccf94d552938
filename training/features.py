"""Features: training batches with the target's states, computed once or every time.

A Lesson is what a drafter sees of some examples: a Batch (its states rounded to the stored dtype)
and the Summary of the target's laws. Kept lessons save the target's forward and its head over the
full vocabulary in later epochs, which is more than half of a step's work on the embedded target;
a store saves them in later runs too. An engine may hold the target and make its states
(served_states.py). A lesson is the same wherever they come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor

from drafters.base import Batch, Features
from drafters.errors import UserError
from drafters.losses import LossSettings
from drafters.shape import TargetShape
from drafters.target import Target
from drafters.teacher import Summary, summarise
from training.batches import documents, pad
from training.examples import Example
from training.feature_store import FeatureStore
from training.lesson_settings import FeatureSettings
from training.served_states import ServedStates
from training.states import States, cut, lay_out

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
        store: where states are read from and added to, or None.
        served: makes states in the target's stead, or None.
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
        store: FeatureStore | None = None,
        served: ServedStates | None = None,
    ) -> None:
        """Keep the parts; nothing is computed yet."""
        self.examples, self.groups = examples, groups
        self.target, self.features, self.settings, self.loss = target, features, settings, loss
        self.store, self.served = store, served
        # a store may keep more layers than are read
        self._layers = features.layers if store is None else store.kind.layers
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
        """Make a lesson, by the target or from the store; states in the stored dtype."""
        examples = [self.examples[i] for i in self.groups[index]]
        return self._lesson(examples, self._states(examples))

    def lesson_of(self, examples: Sequence[Example]) -> Lesson:
        """Return a lesson of any examples, as those of the groups are made; nothing is kept."""
        return _widened(self._lesson(examples, self._made(examples)))

    def is_stored(self, index: int) -> bool:
        """Tell whether a lesson is made without the target."""
        if self.store is None:
            return False
        store = self.store
        return all(
            chat in store for chat in documents([self.examples[i] for i in self.groups[index]])
        )

    @property
    def missing_bytes(self) -> int:
        """Return the bytes that the store has yet to take."""
        return 0 if self.store is None else self.store.missing_bytes(documents(self.examples))

    def flush(self) -> None:
        """Write what the store has not written yet."""
        if self.store is not None:
            self.store.flush()

    def _states(self, examples: Sequence[Example]) -> list[States]:
        """Return the states of all documents, those of the store where it has them."""
        if self.store is None:
            return self._made(examples)
        chats = list(documents(examples))
        stored = [self.store.get(chat) for chat in chats]
        if None not in stored:
            return [states for states in stored if states is not None]
        made = self._made(examples)
        for chat, states in zip(chats, made, strict=True):
            self.store.add(chat, states)
        return [new if old is None else old for old, new in zip(stored, made, strict=True)]

    def _made(self, examples: Sequence[Example]) -> list[States]:
        if self.served is not None:
            return self.served.of(list(documents(examples)))
        return self._run_target(examples)

    def _run_target(self, examples: Sequence[Example]) -> list[States]:
        stored = getattr(torch, self.settings.stored_dtype)
        ids, label_mask, document, position = (x.to(self.target.device) for x in pad(examples))
        features = Features(self._layers, self.features.last)
        taps, last = self.target.forward_batch(ids, document, position, features)
        taps = None if taps is None else taps.to(stored)
        batch = Batch(ids, label_mask, document, position, taps, last.to(stored))
        if self.loss.temperature != 1 and self.store is None:
            unused = torch.zeros(ids.numel(), device=ids.device)  # lessons make their own
            return cut(examples, batch, Summary(unused, unused, unused))
        return cut(examples, batch, summarise(batch, self.target, 1.0, self.loss.chunk))

    def _lesson(self, examples: Sequence[Example], states: Sequence[States]) -> Lesson:
        if self._layers != self.features.layers:
            columns = self._columns()
            states = [part.columns(columns) for part in states]
        batch, summary = lay_out(examples, states, self.target.device)
        if self.loss.temperature != 1:
            summary = summarise(batch, self.target, self.loss.temperature, self.loss.chunk)
        return Lesson(batch, summary, sum(len(example) for example in examples))

    def _columns(self) -> Tensor | None:
        """Return where the layers that are read lie among the store's."""
        if not self.features.layers:
            return None
        width = self.target.shape.hidden_size
        places = torch.tensor([self._layers.index(layer) for layer in self.features.layers])
        return (places[:, None] * width + torch.arange(width)).flatten()


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
        return replace(settings, keep="memory" if needed * _SHARE <= free else "none")
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
    return padded * width * getattr(torch, settings.stored_dtype).itemsize


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
    sizes = [(len(group), max(lengths[i] for i in group)) for group in groups]
    size = target.dtype.itemsize
    needed = max(
        (forward_values(*one, target.shape, loss.chunk) * size for one in sizes), default=0
    )
    if needed > free:
        raise UserError(
            f"a batch needs about {_gb(needed)} of memory and {_gb(free)} are free: lower "
            "data.batch_tokens, data.max_length or loss.chunk"
        )


def forward_values(rows: int, length: int, shape: TargetShape, chunk: int) -> int:
    """Return the values that a target's forward holds beside its weights, from below."""
    wide = _FLOATS_A_TOKEN * shape.hidden_size + 3 * shape.intermediate_size
    logits = min(chunk, rows * length) * shape.vocab_size * 2
    return rows * length * (wide + length) + logits


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

"""Readings: ways to read a text that a drafter may have been trained on, and which fits it best.

The stated reading is the project's own: raw outputs of the stated layers, each feature paired with
the token after it, labels as drafters/alignment.py has them. Every classic mistake is another
reading. A drafter predicts best under the one it was trained on, so each is scored on the same
positions, and another one is believed only if it wins by more than chance over the prompts: tokens
of one text are not independent, so a prompt is one observation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import scipy.stats  # pyright: ignore[reportMissingTypeStubs]
import torch
from torch import Tensor

from drafters.base import Batch, Features, NeuralDrafter
from drafters.vocab import place_of
from inference.doctor.patient import Patient, Text, predict

SURE = 0.8  # agreement of a drafter that was trained to copy what it reads
LEARNED = 0.1  # agreement in training below which a drafter says nothing of how it was trained
LEVEL = 0.01  # chance of naming any other reading where the stated one is right
FEWEST = 3  # prompts
_FLOOR = -12.0  # log-probability of what a drafter cannot say


@dataclass(frozen=True)
class Reading:
    """How a text is read.

    Args:
        name: for a person.
        link: which link is broken if this one fits better; "" if none is.
        layers: whose raw outputs are the features, in this order; the number of layers stands for
            the post-norm state.
        raw_last: whether the last state is read before the norm.
        tokens, features, labels: how many places later than stated each is read.
        holds_answer: whether what is read tells the label: the token itself, or the target's state
            that decides it.
    """

    name: str
    link: str
    layers: tuple[int, ...] = ()
    raw_last: bool = False
    tokens: int = 0
    features: int = 0
    labels: int = 0
    holds_answer: bool = False


@dataclass(frozen=True)
class Score:
    """How well a reading fits, prompt by prompt.

    Args:
        likelihood: mean log-probability of the text's next tokens, in nats.
        agreement: share of them that are the drafter's first choice.
    """

    reading: Reading
    likelihood: tuple[float, ...]
    agreement: tuple[float, ...]

    @property
    def mean_agreement(self) -> float:
        """Return the mean over prompts."""
        return sum(self.agreement) / len(self.agreement)

    @property
    def mean_likelihood(self) -> float:
        """Return the mean over prompts."""
        return sum(self.likelihood) / len(self.likelihood)


def stated(features: Features) -> Reading:
    """Return the reading that the drafter names."""
    return Reading("as stated", "", features.layers)


def others(features: Features, num_layers: int) -> list[Reading]:
    """Return the classic mistakes that this drafter could have been trained with."""
    start, found = stated(features), list[Reading]()
    if features.layers:
        found += _numberings(start, num_layers)
    if features.last:
        found.append(
            replace(start, name="the last state before its norm", link="taps", raw_last=True)
        )
    for step, word in ((1, "later"), (-1, "earlier")):
        move = partial(replace, start, link="shift")
        found.append(move(name=f"tokens one {word}", tokens=step, holds_answer=step > 0))
        if features.layers or features.last:
            found.append(move(name=f"features one {word}", features=step, holds_answer=step > 0))
        found.append(move(name=f"labels one {word}", labels=step, holds_answer=step < 0))
    return found


def _numberings(start: Reading, num_layers: int) -> list[Reading]:
    """Return other layers under the same numbers.

    That the highest layer alone reads better at its neighbour says nothing: of a drafter that
    learned little, whose features start as that layer, any later one would. It is scored so that a
    shift of all layers must beat it.
    """
    found: list[Reading] = []
    layers = start.layers
    lower, top = layers[:-1], layers[-1]
    for step, word in (
        (1, "one later"),
        (-1, "one earlier"),
        (2, "two later"),
        (-2, "two earlier"),
    ):
        moved = tuple(layer + step for layer in layers)
        if moved[0] >= 0 and moved[-1] <= num_layers:
            found.append(replace(start, name=f"every tap {word}", link="taps", layers=moved))
        if lower and lower[-1] < top + step <= num_layers:
            highest = (*lower, top + step)
            found.append(replace(start, name=f"the highest tap {word}", link="", layers=highest))
    if top == num_layers - 1:
        normed = (*lower, num_layers)
        found = [reading for reading in found if reading.layers != normed]
        found.append(replace(start, name="the highest tap post-norm", link="taps", layers=normed))
    if lower:
        found.append(
            replace(start, name="taps in descending order", link="taps", layers=layers[::-1])
        )
    return found


class States:
    """The states of one text that any of the readings asks for."""

    def __init__(self, patient: Patient, text: Text, readings: Sequence[Reading]) -> None:
        """Run the target once."""
        count = patient.target.shape.num_layers
        wanted = {k for reading in readings for k in reading.layers if k < count}
        if any(reading.raw_last for reading in readings):
            wanted.add(count - 1)
        self.layers, self.count = sorted(wanted), count
        features = Features(tuple(self.layers), last=True)
        self.batch = patient.batch(text.ids, text.prompt, features)

    def read(self, reading: Reading) -> Batch:
        """Return the text as a reading has it."""
        batch = self.batch
        taps = None
        if reading.layers:
            taps = torch.cat([self._state(k) for k in reading.layers], -1)
        last = self._state(self.count - 1) if reading.raw_last else batch.last
        return replace(
            batch,
            ids=_moved(batch.ids, reading.tokens),
            taps=None if taps is None else _moved(taps, reading.features),
            last=_moved(last, reading.features),
        )

    def _state(self, layer: int) -> Tensor:
        """Return the raw output of a layer, or the post-norm state [1, T, D]."""
        if layer == self.count:
            return self.batch.last
        assert self.batch.taps is not None
        width = self.batch.last.shape[-1]
        place = self.layers.index(layer)
        return self.batch.taps[..., place * width : (place + 1) * width]


def _moved(x: Tensor, step: int) -> Tensor:
    """Read [1, T, ..] `step` places later; the ends are read again."""
    if not step:
        return x
    places = torch.arange(x.shape[1], device=x.device) + step
    return x[:, places.clamp(0, x.shape[1] - 1)]


def scores(patient: Patient, readings: Sequence[Reading]) -> list[Score]:
    """Score readings on the same positions of every text that is long enough."""
    drafter = patient.neural
    assert drafter is not None
    columns: list[list[tuple[float, float]]] = [[] for _ in readings]
    for text in patient.texts:
        if len(text.ids) - text.prompt < 4:
            continue
        states = States(patient, text, readings)
        for column, reading in zip(columns, readings, strict=True):
            found = _score(patient, drafter, text, states.read(reading), reading.labels)
            if found is not None:
                column.append(found)
    return [
        Score(reading, tuple(a for a, _ in column), tuple(b for _, b in column))
        for reading, column in zip(readings, columns, strict=True)
    ]


def _score(
    patient: Patient, drafter: NeuralDrafter, text: Text, batch: Batch, labels: int
) -> tuple[float, float] | None:
    """Return mean log-probability and agreement of depth 1 over one text's answer."""
    first = next(p for p in predict(drafter, batch, patient.target) if p.depth == 1)
    # one place in from both ends, where every reading has its label
    places = [t for t in first.rows if text.prompt <= t < len(text.ids) - 2]
    if not places:
        return None
    logits = first.logits[[first.rows[t] for t in places]]
    wanted = text.ids[torch.tensor(places) + 1 + labels].to(logits.device)
    size = logits.shape[-1]
    index = place_of(wanted, drafter.ids, size)
    known = index < size
    law = logits.log_softmax(-1).gather(-1, index.clamp_max(size - 1)[:, None])[:, 0]
    right = logits.argmax(-1) == index
    likelihood = law.clamp_min(_FLOOR).where(known, _FLOOR)
    return float(likelihood.mean()), float(right.float().mean())


def chance(stated: Score, other: Score) -> float:
    """Return how likely chance alone lets another reading win by so much: paired t over prompts."""
    gains = [b - a for a, b in zip(stated.likelihood, other.likelihood, strict=True)]
    if max(gains) - min(gains) < 1e-9:
        return 0.0 if min(gains) > 1e-3 else 1.0
    found: Any = cast("Any", scipy.stats).ttest_1samp(gains, 0.0, alternative="greater")
    return float(found.pvalue)


def best(found: Sequence[Score], recorded: float | None = None) -> tuple[Score, float] | None:
    """Return the reading that fits better than the stated one (the first), with its chance.

    It must be likelier than all others, agree more often, and win by more than chance allows for
    so many readings. None: the stated one stands.

    A drafter that learned little still does what it started as, which is to read the target's
    features as the target's own head does: that fits the readings that hold the answer by half.
    One that was trained on such a reading would hardly ever be wrong. And one whose agreement in
    training was far below what a reading shows was not trained on that reading.

    Args:
        found: the stated reading's score, then all others'.
        recorded: agreement that training measured under its own reading; None: not known.
    """
    start, rest = found[0], list(found[1:])
    if recorded is not None and recorded < LEARNED:
        return None
    possible = [
        score
        for score in rest
        if (not score.reading.holds_answer or score.mean_agreement >= SURE)
        and (recorded is None or score.mean_agreement <= 2 * recorded)
    ]
    winner = max([start, *possible], key=lambda score: score.mean_likelihood)
    if winner is start or winner.mean_agreement <= start.mean_agreement:
        return None
    p = chance(start, winner)
    return (winner, p) if p * len(rest) < LEVEL else None


def doubt(stated: Score, other: Score) -> str:
    """Say why a reading is not believed though the drafter agrees more often under it; else ""."""
    if other.mean_agreement <= stated.mean_agreement:
        return ""
    if other.reading.holds_answer and other.mean_agreement < SURE:
        return (
            f" ({other.reading.name}: the answer itself is read there, which fits any drafter; "
            f"one trained so would agree at {SURE:g} or more)"
        )
    return (
        f" ({other.reading.name}: not beyond chance over so few prompts, or more than training "
        "measured; give more prompts)"
    )

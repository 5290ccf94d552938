"""Achieved: how fast runs on this machine were, against what the projection's arithmetic says.

One run gives the rate of this machine: operations a second of a drafter's steps. With that rate the
speed of every other run, of another family too, is predicted from its own workload alone, and that
of passes in which the target made its states.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from drafters.errors import UserError
from drafters.settings import load
from drafters.stored import StoredDrafter
from training.options import TrainSettings
from training.paper_target import PaperTarget, paper_target
from training.workload import Workload, workload

_SUPERVISED = 0.65  # where the chats do not say
_ALONE = 0.8  # a first pass slower than this share of the later ones ran the target too


@dataclass(frozen=True)
class Achieved:
    """A run that was made.

    Args:
        name: its folder.
        work: of a token.
        target: of the run.
        alone: tokens a second of passes over kept states.
        first: tokens a second of a first pass in which the target ran; None: it did not.
    """

    name: str
    work: Workload
    target: PaperTarget
    alone: float
    first: float | None

    @property
    def rate(self) -> float:
        """Return the operations a second of the drafter's steps."""
        return self.alone * self.work.training_flops

    def predicted(self, rate: float) -> float:
        """Return the tokens a second over kept states that a rate makes."""
        return rate / self.work.training_flops

    def predicted_first(self, rate: float) -> float:
        """Return the tokens a second of a pass in which the target makes its states."""
        states = 2 * self.target.active + self.work.teacher_flops
        return rate / (self.work.training_flops + states)


def achieved(folder: Path) -> Achieved:
    """Read a run's folder.

    Raises:
        UserError: if it is no run, or one that was too short to tell.
    """
    settings = load(TrainSettings, [folder / "settings.yaml"])
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(
            f"{folder}: no metrics.jsonl ({error.strerror}): give a run with the tracker jsonl"
        ) from error
    speeds = [s for s in map(json.loads, lines) if "tokens_per_second" in s]
    early = [s["tokens_per_second"] for s in speeds if s["epoch"] <= 1]
    late = [s["tokens_per_second"] for s in speeds if s["epoch"] > 1]
    if not early or not late:
        passes = max((s["epoch"] for s in speeds), default=0)
        raise UserError(
            f"{folder} logged no speed on both sides of its first pass (it made {passes:.2g}): "
            "give a run that went over its chats more than once"
        )
    stored = StoredDrafter.read(folder / "last")
    work = workload(
        stored.family,
        stored.options,
        stored.shape,
        supervised=_supervised(Path(settings.data.path)),
        loss=settings.loss,
    )
    alone, first = median(late), median(early)
    ran = first < _ALONE * alone
    return Achieved(str(folder), work, paper_target(settings.target), alone, first if ran else None)


def compared(runs: Sequence[Achieved]) -> list[dict[str, Any]]:
    """Return predicted and measured tokens a second; the first run's later passes set the rate."""
    rate = runs[0].rate
    found: list[dict[str, Any]] = []
    for number, one in enumerate(runs):
        if number:
            found.append(_line(one.name, "states kept", one.predicted(rate), one.alone))
        if one.first is not None:
            predicted = one.predicted_first(rate)
            found.append(_line(one.name, "target runs too", predicted, one.first))
    return found


def _line(name: str, kind: str, predicted: float, measured: float) -> dict[str, Any]:
    return {
        "run": name,
        "pass": kind,
        "predicted": predicted,
        "measured": measured,
        "off": predicted / measured - 1,
    }


def _supervised(chats: Path) -> float:
    """Return the share of tokens that are an answer's, as the chats' manifest counts them."""
    try:
        counted = json.loads((chats / "manifest.json").read_text(encoding="utf-8"))
        return counted["supervised_tokens"] / counted["tokens"]
    except (OSError, ValueError, KeyError):
        return _SUPERVISED

"""Recent: running means that forget, and the bins that confidences are counted in."""

from bisect import bisect_right
from collections.abc import Hashable
from itertools import pairwise

KEEP = 0.97  # what is left of a round's weight when the next one comes: 33 rounds count in all
TRUST = 2.0  # values that a guess in advance weighs as much as
_BINS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)  # of a drafter's confidence
BIN_MIDDLES = tuple((a + b) / 2 for a, b in pairwise((0.0, *_BINS, 1.0)))


def bin_of(confidence: float) -> int:
    """Return the bin of a confidence in [0, 1]."""
    return bisect_right(_BINS, confidence)


class Recent:
    """Means by key; every new value weighs 1 and the rounds before it fade."""

    def __init__(self) -> None:
        """Start without values."""
        self._sums: dict[Hashable, tuple[float, float]] = {}

    def add(self, key: Hashable, value: float, among: int = 1) -> None:
        """Take in a value, one of so many rows' in its round."""
        total, weight = self._sums.get(key, (0.0, 0.0))
        keep = KEEP ** (1 / among)
        self._sums[key] = keep * total + value, keep * weight + 1

    def mean(self, key: Hashable, guess: float) -> float:
        """Return the mean, drawn towards a guess while values are few."""
        total, weight = self._sums.get(key, (0.0, 0.0))
        return (total + TRUST * guess) / (weight + TRUST)

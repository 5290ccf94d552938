"""Recent: running means that forget."""

from collections.abc import Hashable

KEEP = 0.97  # what is left of a value's weight when the next one comes: 33 values count in all
TRUST = 2.0  # values that a guess in advance weighs as much as


class Recent:
    """Means by key; every new value weighs 1 and the ones before it fade."""

    def __init__(self) -> None:
        """Start without values."""
        self._sums: dict[Hashable, tuple[float, float]] = {}

    def add(self, key: Hashable, value: float) -> None:
        """Take in a value."""
        total, weight = self._sums.get(key, (0.0, 0.0))
        self._sums[key] = KEEP * total + value, KEEP * weight + 1

    def mean(self, key: Hashable, guess: float) -> float:
        """Return the mean, drawn towards a guess while values are few."""
        total, weight = self._sums.get(key, (0.0, 0.0))
        return (total + TRUST * guess) / (weight + TRUST)

"""Payoff: when chains of drafts pay, from acceptance and prices. Pure arithmetic.

Everything is in plain rounds: 1 is a round of plain decoding at the same batch. docs/metrics.md has
the formulas with what they assume.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafters.errors import UserError
from drafters.growth.prices import Prices
from inference.conversions import chain_tau, crossing, survival
from inference.costs import overlapped

LONGEST = 32  # chain that is weighed where one alpha is taken for all depths


@dataclass(frozen=True)
class Payoff:
    """What a drafter's chains bring.

    Args:
        alpha: P(depth d is accepted if d - 1 is), d = 1, 2, ...; no longer chain is weighed.
        prices: of drafting and verifying at this batch.
        overlap: whether the drafter works on a device of its own while the target verifies.
    """

    alpha: tuple[float, ...]
    prices: Prices
    overlap: bool = False

    @classmethod
    def even(cls, alpha: float, prices: Prices, *, overlap: bool = False) -> "Payoff":
        """Take one alpha for all depths.

        Raises:
            UserError: if it is no share.
        """
        if not 0 <= alpha <= 1:
            raise UserError(f"alpha is {alpha}: give a share from 0 to 1")
        return cls((alpha,) * (LONGEST + 1), prices, overlap)

    @property
    def longest(self) -> int:
        """Return the longest chain that is weighed."""
        return min(LONGEST, len(self.alpha))

    def tau(self, gamma: int) -> float:
        """Return emitted tokens a round."""
        return chain_tau(self.alpha, gamma)

    def round(self, gamma: int) -> float:
        """Return the cost of a round."""
        return self._round(gamma, self.alpha)

    def speedup(self, gamma: int) -> float:
        """Return what a chain of gamma brings; 1 for none."""
        return self.tau(gamma) / self.round(gamma) if gamma else 1.0

    def best(self) -> int:
        """Return the gamma that brings most; 0 where no chain pays."""
        return max(range(self.longest + 1), key=self.speedup)

    def break_even(self, gamma: int) -> float | None:
        """Return the one alpha of all depths from which a chain pays; None: not even 1 does.

        A round without drafts costs 1, so nothing but tau = its cost is asked for.
        """

        def gain(alpha: float) -> float:
            every = [alpha] * (gamma + 1)
            return chain_tau(every, gamma) - self._round(gamma, every)

        if gain(1.0) < 0:
            return None
        return 0.0 if gain(0.0) >= 0 else crossing(gain)

    def stops(self) -> int | None:
        """Return the shortest chain beyond the best that slows down; None: none weighed does."""
        beyond = range(self.best() + 1, self.longest + 1)
        return next((gamma for gamma in beyond if self.speedup(gamma) < 1), None)

    def report(self, gamma: int | None) -> dict[str, Any]:
        """Return plain values: figures of every chain, the best and the one asked for."""
        best = self.best()
        shown = self.line(best) if best else None
        return {
            "chains": [self.line(g) for g in range(1, self.longest + 1)],
            "best": shown,
            "asked": None if gamma is None else self.line(self._known(gamma)),
            "stops_at_gamma": self.stops(),
        }

    def line(self, gamma: int) -> dict[str, Any]:
        """Return one chain's figures."""
        return {
            "gamma": gamma,
            "tau": self.tau(gamma),
            "round": self.round(gamma),
            "speedup": self.speedup(gamma),
            "break_even_alpha": self.break_even(gamma),
        }

    def _round(self, gamma: int, alpha: Sequence[float]) -> float:
        draft, verify = self.prices.drafting(gamma), self.prices.tokens(gamma + 1)
        # the guess made while the target verifies serves if all and the bonus are as guessed
        deeper = survival(alpha)[gamma : gamma + 1] if self.overlap else []
        return overlapped(draft, verify, deeper[0] if deeper else 0.0)

    def _known(self, gamma: int) -> int:
        if not 1 <= gamma <= self.longest:
            raise UserError(f"gamma is {gamma}: acceptance is known for 1 to {self.longest}")
        return gamma


def typed_prices(
    c: float, overhead: float, batch: int = 1, flat: int = 0, verify: str = ""
) -> Prices:
    """Return the prices that somebody typed.

    Args:
        c: of every depth.
        overhead: of a round with drafts, whatever its depth.
        batch: rows.
        flat: tokens of a forward, in all rows, up to which it takes one time; 0: any number.
        verify: measured T(n)/T(1) at this batch instead, as N:COST,N:COST.

    Raises:
        UserError: says which value is not allowed.
    """
    for name, value, least in (("c", c, 0), ("overhead", overhead, 0), ("batch", batch, 1)):
        if value < least:
            raise UserError(f"{name} is {value}: give {least} or more")
    if flat < 0:
        raise UserError(f"flat is {flat}: give a number of tokens, or 0 for no limit")
    if flat and verify:
        raise UserError("flat and verify both say what T(n) is: give one of them")
    sizes = _table(verify) if verify else _roofline(batch, flat)
    return Prices(sizes, first=c + overhead, level=c)


def last_batch(alpha: float, c: float, overhead: float, flat: int, *, overlap: bool) -> int:
    """Return the largest batch at which some chain pays, on a roofline; 0 where none ever does."""
    low, high = 0, flat  # at `flat` rows every drafted token costs a whole one of plain decoding
    while high - low > 1:
        middle = (low + high) // 2
        prices = typed_prices(c, overhead, middle, flat)
        pays = Payoff.even(alpha, prices, overlap=overlap).best() > 0
        low, high = (middle, high) if pays else (low, middle)
    return low


def _roofline(batch: int, flat: int) -> tuple[tuple[int, float], ...]:
    if not flat:
        return ((1, 1.0),)
    plain = max(1.0, batch / flat)
    return tuple((n, max(1.0, batch * n / flat) / plain) for n in range(1, LONGEST + 2))


def _table(text: str) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple((int(n), float(cost)) for n, cost in pairs)
    except ValueError:
        raise UserError(f"verify is {text!r}: give N:COST,N:COST such as 1:1,4:1.2") from None

"""When chains pay: published values of the formulas, and where measured costs stand in."""

import math

import pytest

from drafters.errors import UserError
from drafters.growth.prices import Prices
from inference.costs import overlapped
from inference.payoff import Payoff, last_batch, typed_prices


def even(alpha: float, c: float, overhead: float = 0.0, *, overlap: bool = False) -> Payoff:
    return Payoff.even(alpha, typed_prices(c, overhead), overlap=overlap)


@pytest.mark.parametrize(
    ("alpha", "c", "gamma", "value"),
    [
        (0.6, 1 / 20, 4, 1.92),
        (0.8, 1 / 20, 8, 3.09),
        (0.9, 1 / 20, 13, 4.67),
        (0.6, 1 / 5, 2, 1.40),
        (0.8, 1 / 5, 4, 1.87),
        (0.9, 1 / 5, 7, 2.37),
        (0.5, 0.3, 1, 1.15),
        (0.7, 0.01, 9, 2.97),
    ],
)
def test_the_best_chain_and_what_it_brings(
    alpha: float, c: float, gamma: int, value: float
) -> None:
    found = even(alpha, c)
    assert (found.best(), round(found.speedup(gamma), 2)) == (gamma, value)


def test_a_chain_that_is_too_long_slows_down() -> None:
    found = even(0.6, 1 / 5)
    assert round(found.speedup(8), 2) == 0.95
    assert found.stops() == 8
    assert found.report(8)["asked"] == found.line(8)
    assert found.report(None)["asked"] is None


def test_tokens_of_a_round() -> None:
    assert round(even(0.4, 0.0).tau(4), 2) == 1.65
    assert even(1.0, 0.0).tau(4) == 5


@pytest.mark.parametrize(
    ("c", "overhead", "alpha"), [(0.0, 0.2, 0.167), (0.2, 0.0, 0.456), (0.0, 0.0, 0.0)]
)
def test_break_even_of_a_chain_of_four(c: float, overhead: float, alpha: float) -> None:
    """In all: a + a^2 + a^3 + a^4 = .2; each step: = .8, whose root is .4553: from .456 it pays."""
    found = even(0.5, c, overhead).break_even(4)
    assert found is not None
    assert math.ceil(1000 * found) / 1000 == alpha


def test_nothing_pays_where_drafting_costs_as_much_as_it_may_bring() -> None:
    found = even(0.2, 0.25)
    assert (found.best(), found.speedup(0), found.report(None)["best"]) == (0, 1.0, None)
    # some gamma pays if and only if alpha > c
    assert even(0.26, 0.25).best() == 1
    assert even(0.9, 1.25).break_even(4) is None


def test_measured_acceptance_is_not_extrapolated() -> None:
    found = Payoff((0.75, 0.5, 0.5), typed_prices(0.0, 0.0))
    assert (found.longest, found.best(), found.speedup(3)) == (3, 3, 2.3125)
    with pytest.raises(UserError, match="acceptance is known for 1 to 3"):
        found.report(4)


def test_t_of_n_is_what_was_measured() -> None:
    found = Payoff((0.5, 0.5), Prices(((1, 1.0), (2, 1.0), (3, 1.5)), first=0.25))
    assert [found.round(gamma) for gamma in (1, 2)] == [1.25, 1.75]
    assert typed_prices(0.5, 0.25, verify="1:1,3:2") == Prices(((1, 1.0), (3, 2.0)), 0.75, 0.5)


def test_a_batch_uses_up_what_forwards_have_to_spare() -> None:
    """Up to 64 tokens a forward takes one time: 16 rows have room for 4 each."""
    prices = typed_prices(0.0, 0.0, batch=16, flat=64)
    assert [prices.tokens(n) for n in (1, 4, 5, 8)] == [1, 1, 1.25, 2]
    assert typed_prices(0.0, 0.0, batch=128, flat=64).tokens(2) == 2
    # free drafts of alpha .5: one pays while 2 B tokens cost less than 1.5 times as much
    assert last_batch(0.5, 0.0, 0.0, 64, overlap=False) == 47
    assert last_batch(0.1, 0.2, 0.0, 64, overlap=False) == 0


def test_overlap_hides_what_is_guessed_right() -> None:
    assert overlapped(1.0, 4.0, 1.0) == 4
    assert overlapped(6.0, 4.0, 1.0) == 6
    # a chain of 2 at alpha 1/2 is ready in one round of 8: 1 + .5 - .5 / 8
    assert even(0.5, 0.25, overlap=True).round(2) == 1.4375
    assert even(1.0, 0.25, overlap=True).speedup(4) == 5
    measured = Payoff((0.5, 0.5), typed_prices(0.25, 0.0), overlap=True)
    assert measured.round(1) == 1.25 - 0.25 * 0.25
    assert measured.round(2) == 1.5  # what lies behind the last depth was not measured
    both = [even(0.5, 0.25, overlap=o).break_even(4) for o in (True, False)]
    assert both[0] is not None
    assert both[1] is not None
    assert both[0] < both[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"c": -1.0}, "c is -1.0: give 0 or more"),
        ({"batch": 0}, "batch is 0: give 1 or more"),
        ({"flat": -2}, "flat is -2"),
        ({"verify": "1:1,2"}, "verify is '1:1,2': give N:COST,N:COST"),
        ({"verify": "2:1"}, "give sizes ascending from 1"),
        ({"verify": "1:1", "flat": 8}, "give one of them"),
    ],
)
def test_mistakes(given: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        typed_prices(**{"c": 0.0, "overhead": 0.0, **given})


def test_an_alpha_is_a_share() -> None:
    with pytest.raises(UserError, match=r"alpha is 1\.5: give a share from 0 to 1"):
        even(1.5, 0.1)

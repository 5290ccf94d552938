"""The marginal rule: scripted prices and acceptance, exact decisions."""

import math
import random

import pytest
import torch

from drafters.base import Commit
from drafters.growth.ledger import Ledger
from drafters.growth.prices import Prices
from drafters.growth.recent import KEEP, TRUST, Recent
from drafters.tree import TokenTree

FREE = Prices(((1, 1.0),))
# verifying is free up to 5 tokens and costs a quarter a token behind; a level costs an eighth
STEPS = Prices(((1, 1.0), (5, 1.0), (9, 2.0)), first=0.125, level=0.125)


def commit(tokens: list[int], accepted: int, *, confidence: list[float] | None = None) -> Commit:
    """A chain of which so many drafts are accepted, then token -1."""
    scores = None if confidence is None else torch.tensor([1.0, *confidence]).log().cumsum(0)
    chain = TokenTree.chain(tokens)
    tree = TokenTree(chain.tokens, chain.parent, None, scores)
    emitted = (*tokens[1 : accepted + 1], -1)
    path = tuple(range(accepted + 1))
    return Commit(tree.tokens[: accepted + 1], -1, tree=tree, emitted=emitted, path=path)


def feed(ledger: Ledger, accepted: list[int], gamma: int = 2) -> None:
    """Run rounds of a chain of gamma that a drafter proposes by itself."""
    for count in accepted:
        ledger.observe([commit(list(range(gamma + 1)), count)], ledger.levels, [gamma])


def test_recent_values_count_more() -> None:
    recent = Recent()
    assert recent.mean("a", 0.5) == 0.5
    recent.add("a", 1.0)
    recent.add("a", 0.0)
    assert recent.mean("a", 0.5) == pytest.approx((KEEP + TRUST * 0.5) / (KEEP + 1 + TRUST))
    assert recent.mean("b", 0.25) == 0.25


def test_a_promise_is_survival_less_the_time_it_takes() -> None:
    """Nothing judged: every level is accepted by half, one node each, rate 1."""
    assert Ledger(FREE, 3).promise() == (0.5 + 0.25 + 0.125, 3)
    ledger = Ledger(STEPS, 3)
    assert ledger.promise() == (0.375 + 0.125, 2)  # the third earns .125 - .125
    assert ledger.promise(0.5, above=1, nodes=1) == (0.125, 2)
    # behind 5 tokens a level costs an eighth and a node a quarter
    assert ledger.promise(1.0, above=0, nodes=4) == (0.5 - 0.125 - 0.25, 1)
    dear = Ledger(Prices(((1, 1.0),), first=0.75), 3)
    assert dear.promise() == (0.5 + 0.25 + 0.125 - 0.75, 3)


def test_levels_behind_a_step_are_seen() -> None:
    """The second token costs a quarter and the next three nothing: together they pay."""
    ledger = Ledger(Prices(((1, 1.0), (2, 1.625), (5, 1.625))), 4)
    assert ledger.promise() == (0.5 + 0.25 + 0.125 + 0.0625 - 0.625, 4)
    assert ledger.worth([0.5, 0.25, 0.125, 0.0625], 1) == 4
    assert ledger.worth([0.5, 0.1], 1) == 0
    assert ledger.pays(0.5, 1, 0.0, 1)


def test_nodes_are_worth_their_verification() -> None:
    ledger = Ledger(STEPS, 4)
    assert ledger.worth([0.9, 0.3, 0.3, 0.2, 0.2], 1) == 4  # the fifth costs .25
    assert ledger.worth([0.9, 0.3, 0.3, 0.26, 0.26], 1) == 5
    assert ledger.worth([], 1) == 0
    # two rows: four nodes each are free, a ninth costs an eighth a row in the mean
    assert ledger.worth([0.5] * 8 + [0.24], 2) == 8
    assert ledger.worth([0.5] * 8 + [0.26], 2) == 9


def test_what_earns_more_elsewhere_is_left_out() -> None:
    """At a rate of 2 a node must bring twice its cost."""
    ledger = Ledger(STEPS, 4)
    assert ledger.worth([1.0] * 4 + [0.4], 1) == 5
    for _ in range(400):
        ledger.observe([commit([0, 1, 2, 3, 4], 4)], ledger.levels, [4])
    assert ledger.rate == pytest.approx(5 / (1 + 4 * 0.125), rel=1e-3)
    assert ledger.worth([1.0] * 4 + [0.4], 1) == 4


def test_plain_rounds_earn_one() -> None:
    ledger = rested(-1.0)
    for _ in range(20):
        ledger.observe([commit([0], 0)], 0, [0])
    assert ledger.rate == 1


def test_confidence_is_taken_at_its_word_until_it_is_judged() -> None:
    ledger = Ledger(FREE, 3)
    assert [ledger.chance(level, 0.6) for level in (1, 2)] == [0.6, 0.6]
    for _ in range(100):
        ledger.observe([commit([0, 1], 0, confidence=[0.6])], 1, [1])
    weight = (1 - KEEP**100) / (1 - KEEP)
    pooled = TRUST * 0.6 / (weight + TRUST)
    assert ledger.chance(2, 0.6) == pytest.approx(pooled)
    assert ledger.chance(1, 0.6) == pytest.approx(TRUST * pooled / (weight + TRUST))
    assert ledger.chance(1, 0.98) == 0.98  # another bin


def test_siblings_are_counted_each() -> None:
    """Below the root 1 and 2, below 1 another 3: the path takes 1, then something else."""
    ledger = Ledger(FREE, 3)
    scores = torch.tensor([1.0, 0.6, 0.3, 0.6 * 0.9]).log()
    tree = TokenTree(torch.tensor([0, 1, 2, 3]), torch.tensor([-1, 0, 0, 1]), None, scores)
    seen = Commit(tree.tokens[:2], 7, tree=tree, emitted=(1, 7), path=(0, 1))
    ledger.observe([seen], 2, [2])
    one = 1 + TRUST
    assert ledger.chance(1, 0.6) == pytest.approx((1 + TRUST * (1 + TRUST * 0.6) / one) / one)
    assert ledger.chance(1, 0.3) == pytest.approx(TRUST * TRUST * 0.3 / one / one)
    assert ledger.chance(2, 0.9) == pytest.approx(TRUST * TRUST * 0.9 / one / one)


def test_a_level_that_was_drafted_but_not_kept_counts_as_missed() -> None:
    pruned, kept = Ledger(FREE, 2), Ledger(FREE, 2)
    for _ in range(50):
        pruned.observe([commit([0], 0, confidence=[])], 2, [1])
        kept.observe([commit([0, 1], 1, confidence=[0.6])], 2, [1])
    assert pruned.promise()[0] < 0.1
    assert kept.promise()[0] > 0.9


def test_nothing_is_drafted_where_nothing_pays_and_trials_grow_rare() -> None:
    ledger = Ledger(STEPS, 2)
    assert ledger.levels == 2
    rounds, trials = 0, []
    while rounds < 1000:
        levels = ledger.levels
        if levels:
            trials.append(rounds)
        tokens = [0, 1, 2][: levels + 1]
        ledger.observe([commit(tokens, 0)], levels, [levels])
        rounds += 1
    learning = next(i for i, number in enumerate(trials) if number != i)
    assert learning < 12
    gaps = [b - a - 1 for a, b in zip(trials[learning - 1 :], trials[learning:], strict=False)]
    assert gaps == [16, 32, 64, 128, 256, 256]
    assert ledger.asleep


def test_a_drafter_that_is_right_but_too_dear_is_left_alone() -> None:
    """One level costs more than a plain round: being right does not bring it back."""
    ledger = Ledger(Prices(((1, 1.0),), first=1.75, level=1.0), 3)
    trials = 0
    for _ in range(600):
        levels = ledger.levels
        trials += levels > 0
        ledger.observe([commit([0, 1, 2, 3][: levels + 1], levels)], levels, [levels])
    assert ledger.asleep
    assert trials < 8


def test_it_comes_back_when_the_text_grows_easy_and_stays() -> None:
    ledger = Ledger(STEPS, 2)
    while not ledger.asleep:
        feed(ledger, [0])
    rounds = 0
    while ledger.asleep:
        levels = ledger.levels
        ledger.observe([commit([0, 1, 2][: levels + 1], levels)], levels, [levels])
        rounds += 1
        assert rounds < 40
    assert rounds > 16  # it waited, then every trial was taken
    gain = ledger.promise()[0]
    assert gain > 0.03
    feed(ledger, [0])  # one miss is within the margin
    assert not ledger.asleep


def test_a_drafter_without_a_guess_teaches_nothing() -> None:
    ledger = Ledger(STEPS, 2)
    before = ledger.promise()
    feed(ledger, [0] * 50, gamma=0)
    assert ledger.promise() == before
    assert not ledger.asleep


def test_a_row_that_ends_judges_what_it_reached() -> None:
    ledger = Ledger(FREE, 4)
    cut = commit([0, 1, 2, 3], 1)
    ended = Commit(cut.inputs, 2, tree=cut.tree, finished="stop", emitted=(1, 2), path=(0, 1))
    assert (ended.accepted, ended.attempted) == (2, 2)
    ledger.observe([ended], 4, [3])
    alpha, total, survival = 0.5, 0.0, 1.0
    for level in (1, 2, 3, 4):
        if level <= 2:
            alpha = (1 + TRUST * alpha) / (1 + TRUST)
        survival *= alpha
        total += survival
    assert ledger.promise() == (pytest.approx(total), 4)


def test_a_level_behind_a_missed_one_is_not_judged() -> None:
    """It is taken to be accepted as often as the one above it."""
    ledger = Ledger(FREE, 3)
    feed(ledger, [0], gamma=3)
    one = TRUST / 2 / (1 + TRUST)
    assert ledger.promise() == (pytest.approx(one + one**2 + one**3), 3)


def test_what_only_just_breaks_even_is_left_out() -> None:
    narrow = Ledger(Prices(((1, 1.0),), first=0.25, level=0.25), 2)
    assert narrow.promise() == (0.25, 1)
    assert narrow.levels == 1
    assert Ledger(STEPS, 4).worth([0.5, 0.5, 0.5, 0.5, 0.25], 1) == 4
    line = Ledger(Prices(((1, 1.0), (2, 1.5), (3, 2.0))), 1)
    assert not line.pays(0.5, 1, 0.0, 1)
    assert line.pays(0.51, 1, 0.0, 1)
    step = Ledger(Prices(((1, 1.0), (2, 1.0), (3, 1.5), (9, 1.5))), 3)
    assert not step.pays(0.3, 2, 1.0, 1)  # a half for .3 and the .15 below it
    assert step.pays(0.34, 2, 1.0, 1)
    # of two rows one node costs half as much a row, and both rows' time
    assert not line.pays(0.5, 1, 0.5, 2)
    assert line.pays(0.51, 1, 0.5, 2)


def test_no_level_left_promises_less_than_nothing() -> None:
    ledger = Ledger(FREE, 2)
    assert ledger.promise(1.0, above=2, nodes=2) == (-math.inf, 2)
    assert ledger.promise(1.0, above=1, nodes=2) == (0.5, 2)


def test_a_round_earns_its_tokens_in_its_time() -> None:
    """Two rows of 3 and 1 tokens, two levels and one and a half nodes a row in the mean."""
    ledger = Ledger(Prices(((1, 1.0), (9, 2.0)), first=0.5, level=0.25), 3)
    ledger.observe([commit([0, 1, 2], 2), commit([0, 1], 0)], 2, [2, 1])
    time = 1.0 + 1.5 / 8 + 0.5 + 0.25
    assert ledger.rate == pytest.approx((KEEP + 2) / (KEEP + time))
    ledger.observe([commit([0], 0)], 0, [0])
    assert ledger.rate == pytest.approx((KEEP * (KEEP + 2) + 1) / (KEEP * (KEEP + time) + 1))


def test_wide_levels_promise_with_what_they_cost() -> None:
    """Two nodes at level 1 and none at level 2: sizes 4/3 and 2/3 in the mean."""
    ledger = Ledger(Prices(((1, 1.0), (9, 2.0))), 2)
    tree = TokenTree(torch.tensor([0, 1, 2]), torch.tensor([-1, 0, 0]))
    seen = Commit(tree.tokens[:2], 7, tree=tree, emitted=(1, 7), path=(0, 1))
    ledger.observe([seen], 2, [2])
    rate = (KEEP + 2) / (KEEP + 1.25)
    one, two = 2 / 3, 2 / 3 * 4 / 9
    assert ledger.rate == pytest.approx(rate)
    assert ledger.promise() == (pytest.approx(one + two - rate * 2 / 8), 2)
    assert ledger.promise(1.0, 1, 1.0) == (pytest.approx(4 / 9 - rate * 2 / 3 / 8), 2)


def rested(plan: float, *, asleep: bool = False, accepted: bool = False, gap: int = 16) -> Ledger:
    """Let a ledger decide over its rest when the coming round promises so much."""
    ledger = Ledger(FREE, 2)
    ledger._plan, ledger.asleep, ledger._gap, ledger._wait = (plan, 1), asleep, gap, 5
    ledger._rest(accepted)
    return ledger


def test_it_falls_asleep_below_nothing_and_wakes_above_the_margin() -> None:
    assert Ledger(FREE, 2).asleep is False
    assert not rested(0.0).asleep
    assert rested(-1e-9).asleep
    assert rested(0.03, asleep=True).asleep
    assert rested(0.031, asleep=True).asleep is False


def test_trials_come_again_at_once_or_twice_as_late() -> None:
    assert (rested(-1.0)._gap, rested(-1.0)._wait) == (16, 16)
    late = rested(-1.0, asleep=True, gap=32)
    assert (late._gap, late._wait, late.levels) == (64, 64, 0)
    latest = rested(-1.0, asleep=True, gap=256)
    assert (latest._gap, latest._wait) == (256, 256)
    soon = rested(-1.0, asleep=True, accepted=True, gap=64)
    assert (soon._gap, soon._wait, soon.levels) == (64, 0, 1)


def test_a_trial_that_paid_is_made_again_at_once() -> None:
    """A round of two rows takes 1.9 units: 3 tokens of theirs are not enough, 4 are."""
    for taken, wait in ((0, 32), (1, 32), (2, 0)):
        ledger = Ledger(Prices(((1, 1.0),), first=0.9), 2)
        feed(ledger, [0] * 50, gamma=1)
        ledger.asleep, ledger._gap, ledger._wait = True, 16, 0
        rows = [commit([0, 1], int(row < taken)) for row in range(2)]
        ledger.observe(rows, 1, [1, 1])
        assert (ledger.asleep, ledger._wait) == (True, wait)


def test_hope_is_what_a_drafter_that_is_always_right_would_earn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """n drafts bring n tokens, for the drafting and the verification of n more."""
    for first, level, hopeful in (
        *((0.9, 1.0, True), (1.5, 0.3, True)),
        *((1.9, 0.9, False), (2.5, 0.0, False)),  # a third level would pay
    ):
        ledger = Ledger(Prices(((1, 1.0), (3, 1.1)), first=first, level=level), 2)
        assert ledger._hope is hopeful
    monkeypatch.setattr("drafters.growth.ledger._WAKE", 0.25)
    assert not Ledger(Prices(((1, 1.0),), first=0.75), 1)._hope


@pytest.mark.parametrize(
    ("rows", "alpha", "least", "most"),
    [(1, 0.3, 0, 15), (4, 0.3, 0, 15), (16, 0.3, 0, 15), (16, 0.7, 290, 300)],
)
def test_many_rows_rest_as_one_does(rows: int, alpha: float, least: int, most: int) -> None:
    """A draft pays from alpha .55 on: some row of many is always lucky, which says nothing."""
    prices = Prices(((1, 1.0), (2, 1.45), (4, 2.35)), first=0.1, level=0.05)
    ledger, luck, drafted = Ledger(prices, 3), random.Random(0), 0
    for _ in range(300):
        levels = ledger.levels
        drafted += levels > 0
        accepted = [
            next((n for n in range(levels) if luck.random() >= alpha), levels) for _ in range(rows)
        ]
        commits = [commit(list(range(levels + 1)), count) for count in accepted]
        ledger.observe(commits, levels, [levels] * rows)
    assert least <= drafted <= most

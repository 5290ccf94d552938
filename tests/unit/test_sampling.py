"""Warps equal Hugging Face's processors; a row's randomness is its own."""

import math
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drafters.errors import UserError
from drafters.laws import Law
from drafters.sampling import Coin, RowRandom, Warp, _place, check_seed

# the first two numbers of both coins of seed 5, row 3
DRAFT, VERIFY = [0.6701753, 0.1033339], [0.2065046, 0.1074843]


@pytest.mark.parametrize("top_k", [0, 1, 7])
@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.01])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_equals_hugging_face(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(0)) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    want = warpers(torch.zeros(16, 1, dtype=torch.int64), logits.clone()).softmax(-1)
    assert torch.allclose(Warp(0.7, top_k, top_p, min_p).laws(logits).probs, want, atol=1e-6)


def test_greedy_is_a_point_mass_on_the_lowest_best_id() -> None:
    laws = Warp().laws(torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 5.0]]))
    assert laws.probs.tolist() == [[1.0], [1.0]]
    assert laws.ids is not None
    assert laws.ids.tolist() == [[1], [2]]


def test_reduced_vocabulary_keeps_its_ids() -> None:
    ids = torch.tensor([4, 9])
    laws = Warp(1.0).laws(torch.tensor([[0.0, 1.0]]), ids)
    assert float(laws.law(0).weight(9)) == pytest.approx(0.7310586)
    assert float(laws.law(0).weight(5)) == 0
    assert Warp().laws(torch.tensor([[0.0, 1.0]]), ids).ids.tolist() == [[9]]


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("top_k", -2), ("top_p", 0.0), ("top_p", 1.5), ("min_p", 2.0)],
)
def test_values_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{field} is {value}"):
        Warp(**{field: value})


def test_draws_follow_the_law() -> None:
    coin, law = Coin(0), Law(torch.tensor([0.1, 0.0, 0.6, 0.3]))
    counts = torch.bincount(torch.tensor([coin.draw(law) for _ in range(1500)]), minlength=4)
    assert counts[1] == 0
    assert chisquare(counts[[0, 2, 3]], [150, 900, 450]).pvalue > 1e-3


def test_distinct_draws_follow_the_law() -> None:
    """The ordered pair of two draws without replacement."""
    coin, probs = Coin(0), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    pairs = coin.draw_distinct(probs.expand(6000, 3), 2)
    assert (pairs[:, 0] != pairs[:, 1]).all()
    index = pairs[:, 0] * 3 + pairs[:, 1]
    expected = {
        a * 3 + b: 6000 * float(probs[a] * probs[b] / (1 - probs[a]))
        for a in range(3)
        for b in range(3)
        if a != b
    }
    counts = torch.bincount(index, minlength=9)
    seen = [int(counts[i]) for i in expected]
    assert chisquare(seen, list(expected.values())).pvalue > 1e-3


def test_rows_own_their_randomness() -> None:
    state = torch.random.get_rng_state()
    first = RowRandom(42, 0).verify.uniform((5,))
    assert torch.equal(first, RowRandom(42, 0).verify.uniform((5,)))
    for other in (RowRandom(42, 1).verify, RowRandom(43, 0).verify, RowRandom(42, 0).draft):
        assert not torch.equal(first, other.uniform((5,)))
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("size", [3, 256, 300, 1000])
def test_a_draw_in_blocks_is_a_draw_from_the_running_sum(size: int) -> None:
    coin, twin = Coin(7), Coin(7)
    weights = torch.rand(size, generator=torch.Generator().manual_seed(size))
    weights[1:][weights[1:] < 0.5] = 0.0
    total = weights.double().cumsum(0)
    for _ in range(200):
        point = twin.uniform(()).double() * total[-1]
        assert coin.draw(Law(weights)) == int(torch.searchsorted(total, point, right=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "warp",
    [Warp(), Warp(0.7), Warp(1.0, top_k=3), Warp(1.0, top_p=0.9), Warp(1.0, min_p=0.1)],
    ids=str,
)
def test_a_law_of_logits_that_are_not_finite_says_so(warp: Warp, dtype: torch.dtype) -> None:
    """Wherever it stands, one NaN or infinity makes its row's law NaN, and no other's."""
    logits = torch.randn(4, 40).to(dtype)
    logits[0, 3] = -torch.inf  # a token that cannot come is no fault
    assert not warp.laws(logits).broken.any()
    for place in (0, 7, 39):
        for value in (torch.nan, torch.inf):
            spoilt = logits.clone()
            spoilt[2, place] = value
            laws = warp.laws(spoilt)
            assert laws.broken.tolist() == [False, False, True, False]
            assert laws.probs[2].isnan().all()
    spoilt = logits.clone()
    spoilt[1] = -torch.inf
    assert warp.laws(spoilt).broken.tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": math.inf}, "temperature is inf: give 0 (greedy), or 1e-30 or more"),
        ({"temperature": -0.5}, "temperature is -0.5: give 0 (greedy), or 1e-30 or more"),
        ({"temperature": 9e-31}, "temperature is 9e-31: give 0 (greedy), or 1e-30 or more"),
        ({"top_k": -1}, "top_k is -1: give 0 (off) or a whole number above it"),
        ({"top_p": 0}, "top_p is 0: give a value in (0, 1]; 1 is off"),
        ({"top_p": 1.25}, "top_p is 1.25: give a value in (0, 1]; 1 is off"),
        ({"min_p": -0.25}, "min_p is -0.25: give a value in [0, 1]; 0 is off"),
        ({"min_p": 1.25}, "min_p is 1.25: give a value in [0, 1]; 0 is off"),
        ({"temperature": "hot"}, "temperature is 'hot': give a number"),
        ({"top_k": 2.5}, "top_k is 2.5: give a whole number"),
    ],
)
def test_what_a_value_out_of_range_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        Warp(**options)
    assert str(raised.value) == message


def test_what_is_off_changes_no_bit() -> None:
    logits = 3 * torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    logits[:, :3] = -200.0  # so unlikely that their share is 0, or nearly
    assert torch.equal(Warp(1.0).laws(logits).probs, logits.softmax(-1))


def test_the_ends_of_the_ranges_are_legal() -> None:
    assert Warp(top_p=1.0, min_p=1.0).greedy
    assert Warp(top_p=1e-9, min_p=0.0, top_k=0).greedy
    assert not Warp(1e-30).greedy
    assert not Warp(1.0).greedy


@pytest.mark.parametrize(
    "warp",
    [Warp(0.7), Warp(1.0, top_k=5), Warp(1.0, top_p=0.6), Warp(1.0, min_p=0.3), Warp()],
    ids=str,
)
def test_laws_of_more_axes_are_those_of_their_rows(warp: Warp) -> None:
    logits = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(1))
    found, rows = warp.laws(logits), warp.laws(logits.flatten(0, 1))
    assert torch.equal(found.probs.flatten(0, 1), rows.probs)
    if warp.greedy:
        assert torch.equal(found.ids.flatten(0, 1), rows.ids)


def test_top_k_of_one_and_of_all() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    assert Warp(1.0, top_k=1).laws(logits).probs.tolist() == [[0.0, 0.0, 1.0]]
    whole = Warp(1.0).laws(logits)
    for top_k in (3, 4):
        assert torch.equal(Warp(1.0, top_k=top_k).laws(logits).probs, whole.probs)
    assert (Warp(1.0, top_k=2).laws(logits).probs > 0).tolist() == [[False, True, True]]
    ties = Warp(1.0, top_k=2).laws(torch.tensor([[1.0, 1.0, 2.0]])).probs
    assert (ties > 0).all()


def test_top_p_and_min_p_at_their_thresholds() -> None:
    """Laws (1/2, 1/4, 1/4): what falls exactly on a threshold."""
    logits = torch.tensor([[2.0, 1.0, 1.0]]).log()
    kept = [(Warp(1.0, top_p=p).laws(logits).probs > 0).int().tolist() for p in (0.45, 0.74, 0.8)]
    assert kept == [[[1, 0, 0]], [[1, 0, 1]], [[1, 1, 1]]]
    even = Warp(1.0, top_p=0.75).laws(torch.zeros(1, 4)).probs  # quarters, exactly
    assert (even > 0).int().tolist() == [[0, 1, 1, 1]]
    half, more = (Warp(1.0, min_p=p).laws(logits).probs for p in (0.49, 0.51))
    assert half.tolist() == [pytest.approx([0.5, 0.25, 0.25])]
    assert more.tolist() == [[1.0, 0.0, 0.0]]
    assert Warp(1.0, min_p=1.0).laws(logits).probs.tolist() == [[1.0, 0.0, 0.0]]


def test_a_law_says_which_node_it_is_of() -> None:
    logits = torch.zeros(3, 2)
    for warp in (Warp(), Warp(1.0)):
        laws = warp.laws(logits)
        assert laws.of.tolist() == [0, 1, 2]
        assert laws.probs.dtype == torch.float32
    assert Warp(1.0).laws(logits.bfloat16()).probs.dtype == torch.float32


def test_seeds_give_the_same_numbers_for_ever() -> None:
    """What was drawn from a seed can be drawn again by a later version."""
    draft, verify = (coin.uniform((2,)) for coin in vars(RowRandom(5, 3)).values())
    assert draft.tolist() == pytest.approx(DRAFT)
    assert verify.tolist() == pytest.approx(VERIFY)
    assert torch.equal(RowRandom(5).draft.uniform((2,)), RowRandom(5, 0).draft.uniform((2,)))
    assert draft.dtype == torch.float32


def test_no_row_shares_a_coin_with_another() -> None:
    coins = [coin for row in range(4) for coin in vars(RowRandom(1, row)).values()]
    assert len({tuple(coin.uniform((4,)).tolist()) for coin in coins}) == 8


def test_certain_and_impossible() -> None:
    coin = Coin(0)
    assert all(coin.accept(1.0) for _ in range(50))
    assert not any(coin.accept(0.0) for _ in range(50))
    assert coin.accept(torch.tensor(1.0)) is True


def test_a_law_of_one_token_costs_no_number() -> None:
    coin, twin = Coin(3), Coin(3)
    assert coin.draw(Law(torch.ones(1), torch.tensor([7]))) == 7
    assert torch.equal(coin.uniform((3,)), twin.uniform((3,)))
    assert coin.draw(Law(torch.ones(1))) == 0
    assert coin.draw(Law(torch.tensor([0.0, 2.0]), torch.tensor([7, 9]))) == 9


class Fixed(Coin):
    """A coin whose numbers are given."""

    def __init__(self, number: float) -> None:
        self.number = number

    def uniform(self, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, self.number)


def test_a_draw_takes_the_first_place_beyond_its_share() -> None:
    """Zero weights are never drawn, at the ends of blocks neither."""
    weights = torch.zeros(600)
    weights[[3, 255, 256, 599]] = 1.0
    found = [Fixed(share).draw(Law(weights)) for share in (0.0, 0.25, 0.5, 0.75, 0.99)]
    assert found == [3, 255, 256, 599, 599]


def test_a_share_beyond_the_exact_sum_is_the_last_weights() -> None:
    """A block's sum is rounded up to 1 + 2^-23: a share of nearly all lies behind its weights."""
    weights = torch.tensor([1.0, 1e-30, 1.01 * 2**-24, 0.0])
    assert _place(weights, torch.tensor(1 - 1e-8, dtype=torch.float64)) == 2


def test_a_number_equal_to_the_probability_refuses() -> None:
    assert [Fixed(x).accept(p) for x, p in ((0.0, 0.0), (0.5, 0.5), (0.25, 0.5))] == [
        *(False, False, True)
    ]


def test_surplus_distinct_draws_have_no_weight() -> None:
    """The race is won by the largest weight over time; equal times leave the largest weight."""
    probs = torch.tensor([[0.2, 0.0, 0.5, 0.3]])
    assert Fixed(0.5).draw_distinct(probs, 4).tolist() == [[2, 3, 0, 1]]
    assert Fixed(0.0).draw_distinct(probs, 1).tolist() == [[2]]


def test_seeds_that_generators_cannot_hold_are_refused() -> None:
    for seed in (2**40, -(2**40)):
        check_seed(seed)
    for seed in (2**40 + 1, -(2**40) - 1):
        with pytest.raises(UserError) as raised:
            check_seed(seed)
        assert str(raised.value) == (
            f"seed is {seed}: give a whole number from -1099511627776 to 1099511627776"
        )

"""Rows that share a batch: each decodes what it decodes alone, whoever comes, ends or leaves."""

from itertools import cycle

import pytest
import torch

from drafters.base import Drafter
from drafters.growth import Growth, Static
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from drafters.tree import TokenTree
from inference.engine import Decoder, Request
from inference.stop import Stop
from tests.tiny import prompts_of, tiny_target
from tests.unit.test_every_drafter import GROWTHS, NAMES, SAMPLED, SIZES
from tests.unit.test_every_drafter import make as make_drafter

PROMPTS = prompts_of(9, 2, 14, 5, 1)
BUDGETS = (12, 3, 14, 9, 11)
HOT = Warp(temperature=0.9)
PLAIN = Warp()
CASES = list(zip(2 * NAMES, len(NAMES) * [HOT] + len(NAMES) * [PLAIN], strict=True))
SHAPES = [
    (name, warp, growth)
    for (name, warp), growth in zip(CASES, cycle(SAMPLED + GROWTHS), strict=False)
]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(**SIZES)


def decoder_of(
    target: Target, drafter: Drafter, growth: Growth, warp: Warp, rows: int, capacity: int = 30
) -> Decoder:
    return Decoder(target, drafter, growth, rows=rows, capacity=capacity, warp=warp, stop=Stop())


def request(number: int) -> Request:
    return Request(PROMPTS[number], BUDGETS[number], RowRandom(11, number))


def tokens_of(decoder: Decoder, row: int, number: int) -> list[int]:
    found = decoder.rows[row]
    assert found is not None
    return found.ids[len(PROMPTS[number]) :]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "warp", "growth"), SHAPES, ids=str)
def test_rows_come_end_and_are_taken_out(
    name: str, warp: Warp, growth: Growth, target: Target
) -> None:
    drafter = make_drafter(name, target)
    alone = []
    for number in range(len(PROMPTS)):
        single = decoder_of(target, drafter, growth, warp, rows=1)
        single.admit({0: request(number)})
        while single.running:
            single.round()
        alone.append(tokens_of(single, 0, number))
        assert len(alone[-1]) == BUDGETS[number]

    decoder = decoder_of(target, drafter, growth, warp, rows=4)
    decoder.admit({0: request(0), 2: request(1)})  # row 1 stays empty between them
    decoder.round()
    decoder.admit({1: request(2), 3: request(3)})
    decoder.round()
    taken = tokens_of(decoder, 3, 3)
    decoder.release(3)  # it has not ended
    assert taken == alone[3][: len(taken)]
    assert len(taken) < BUDGETS[3]
    decoder.round()
    decoder.admit({3: request(4)})
    while decoder.running:
        decoder.round()
    found = [tokens_of(decoder, row, number) for row, number in ((0, 0), (2, 1), (1, 2), (3, 4))]
    assert found == [alone[0], alone[1], alone[2], alone[4]]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_cached_logits_after_fifty_rounds(engine: str) -> None:
    """With rows that ended and began anew on the way: as if recomputed from scratch, to 1e-4."""
    target = tiny_target(engine=engine, initializer_range=0.3, **SIZES)
    drafter = make_drafter("draft_model", target)
    decoder = decoder_of(target, drafter, Static((3, 1, 2)), Warp(0.6), rows=3, capacity=220)
    budgets = cycle((200, 13, 29))
    rounds = [0, 0, 0]
    fresh = iter(range(1000))
    while max(rounds) < 50:
        free = [row for row in range(3) if row not in decoder.running]
        for row in free:
            decoder.release(row)
        if free:
            decoder.admit(
                {
                    row: Request(PROMPTS[row], next(budgets), RowRandom(3, next(fresh)))
                    for row in free
                }
            )
        for row, commit in enumerate(decoder.round()):
            rounds[row] = rounds[row] + 1 if commit is not None else rounds[row]
    rows = [row for row in decoder.rows if row is not None]
    assert [len(row.ids) - 1 for row in rows] == decoder.cache.lengths.tolist()
    roots = [TokenTree.chain([row.ids[-1]]) for row in rows]
    outputs = target.forward_trees(roots, decoder.cache, drafter.features)
    for row, output in zip(rows, outputs, strict=True):
        assert output is not None
        with torch.no_grad():
            scratch = target.model(torch.tensor([row.ids])).logits[0, -1]
        assert torch.allclose(output.logits[0], scratch, atol=1e-4, rtol=0)

"""Placement: every cell, position and mask as the definitions have them, token by token."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from drafters.cache import KVCache
from drafters.masks import _ROUND, ChainMasks, additive
from drafters.placement import Block, Placement, causal_block
from drafters.tree import TokenTree

CAPACITY = 96


def tree_block(*paths: Sequence[int]) -> Block:
    tree = TokenTree.from_paths(0, paths)
    return Block(tree.depth, tree.visible)


FORK = tree_block([1, 2], [3])  # offsets 0 1 2 1
CASES: dict[str, tuple[list[int], list[Block | None]]] = {
    "one token": ([5], [causal_block(1)]),
    "one chain": ([5], [causal_block(3)]),
    "one tree": ([5], [FORK]),
    "one wide chain": ([3], [causal_block(70)]),
    "one token that is no chain": ([5], [Block(torch.arange(1), torch.ones(1, 1).bool())]),
    "chain of the second row": ([9, 4], [None, causal_block(3)]),
    "token of the third row": ([9, 2, 4], [None, None, causal_block(1)]),
    "equal rows": ([4, 4], [causal_block(2), causal_block(2)]),
    "equal single tokens": ([4, 4], [causal_block(1), causal_block(1)]),
    "unequal single tokens": ([4, 1], [causal_block(1), causal_block(1)]),
    "unequal widths": ([6, 2], [causal_block(1), FORK]),
    "trees of one width": ([6, 2], [causal_block(4), FORK]),
    "a row between": ([6, 8, 2], [causal_block(2), None, FORK]),
    "a row between equals": ([3, 8, 2], [causal_block(2), None, causal_block(2)]),
    "outer rows left out": ([9, 3, 2, 9], [None, FORK, causal_block(2), None]),
    "single tokens around a row": ([4, 1, 3], [causal_block(1), None, causal_block(1)]),
    "empty rows": ([0, 0], [causal_block(3), causal_block(2)]),
}


def placed(lengths: list[int], blocks: list[Block | None], device: str = "cpu") -> Placement:
    cache = KVCache(len(lengths), CAPACITY, layers=1, heads=1, head_dim=1, device=device)
    cache.advance(lengths)
    return cache.place(blocks)


def taking_part(blocks: list[Block | None]) -> list[tuple[int, Block]]:
    return [(row, block) for row, block in enumerate(blocks) if block is not None]


def seen(length: int, block: Block, span: int, window: int | None, blind: int) -> Tensor:
    """Return [n, span]: which columns the new tokens of a row see."""
    new = length + block.offset
    position = torch.cat((torch.arange(length), new))
    near = new[:, None] - position < (window or 10**6)
    known = torch.ones(len(new), length, dtype=torch.bool)
    found = near & torch.cat((known, block.visible), 1) & (torch.arange(len(position)) >= blind)
    return torch.nn.functional.pad(found, (0, span - len(position)))


@pytest.mark.parametrize("case", CASES)
def test_cells_and_positions(case: str) -> None:
    lengths, blocks = CASES[case]
    found, rows = placed(lengths, blocks), taking_part(blocks)
    cells = [row * CAPACITY + lengths[row] + i for row, b in rows for i in range(len(b.offset))]
    own = found.cells
    assert (list(range(own.start, own.stop)) if isinstance(own, slice) else own.tolist()) == cells
    assert isinstance(own, slice) == (len(rows) == 1)
    positions = [lengths[row] + offset for row, b in rows for offset in b.offset.tolist()]
    assert found.positions.tolist() == positions
    assert found.rows == slice(rows[0][0], rows[-1][0] + 1)
    assert found.counts == [0 if block is None else len(block.offset) for block in blocks]
    assert found.width == max(found.counts)
    assert found.span == max(lengths[row] + len(block.offset) for row, block in rows)
    assert (found.starts is None) == (found.width > 1)
    if found.starts is not None:
        assert found.starts.tolist() == [row * CAPACITY for row, _ in rows]
    for row, block in rows:
        query = found.query_position[row - rows[0][0]]
        assert query[: len(block.offset)].tolist() == (lengths[row] + block.offset).tolist()
        keys = [*range(lengths[row]), *(lengths[row] + block.offset).tolist()]
        assert found.key_position[row - rows[0][0], : len(keys)].tolist() == keys
    assert found.key_position.shape == (len(found.query_position), found.span)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [None, 1, 2, 5, 6, 8, 60])
@pytest.mark.parametrize("blind", [0, 2])
def test_who_sees_whom(case: str, window: int | None, blind: int) -> None:
    lengths, blocks = CASES[case]
    found, rows = placed(lengths, blocks), taking_part(blocks)
    found = found.blind_before(blind) if blind else found
    masks = [found.mask(window, 1, torch.float32), found.mask(window, 3, torch.float64)]
    for mask, groups, dtype in zip(masks, (1, 3), (torch.float32, torch.float64), strict=True):
        if mask is None:
            mask = torch.zeros(len(found.query_position), 1, groups * found.width, found.span)
            mask = mask.to(dtype)
        assert mask.dtype == dtype
        assert mask.shape == (len(found.query_position), 1, groups * found.width, found.span)
        lowest = torch.finfo(dtype).min
        assert bool(((mask == 0) | (mask == lowest)).all())
        for row, block in rows:
            want = seen(lengths[row], block, found.span, window, blind)
            heads = mask[row - rows[0][0], 0].view(groups, found.width, found.span)
            for head in heads:
                assert torch.equal(head[: len(block.offset)] == 0, want)
    assert found.mask(window, 1, torch.float32) is masks[0] or found.chain is not None


@pytest.mark.parametrize("case", [case for case in CASES if "token" in case])
@pytest.mark.parametrize("window", [None, 1, 3, 60])
@pytest.mark.parametrize("blind", [0, 1])
def test_a_single_token_sees_one_run_of_cells(case: str, window: int | None, blind: int) -> None:
    lengths, blocks = CASES[case]
    found = placed(lengths, blocks).blind_before(blind)
    runs = found.runs(window)
    assert runs is not None
    rows = taking_part(blocks)
    for (row, block), first, count in zip(rows, *(x.tolist() for x in runs), strict=True):
        want = seen(lengths[row], block, found.span, window, blind)[0]
        columns = want.nonzero().flatten().tolist()
        assert [first + i - row * CAPACITY for i in range(count)] == columns


def test_what_is_no_run_says_so() -> None:
    assert placed(*CASES["one chain"]).runs(None) is None
    found = placed(*CASES["one token"])
    found.moved = torch.arange(6)[None] + 3
    assert found.runs(2) is None
    assert found.runs(None) is not None


@pytest.mark.parametrize("case", ["one tree", "equal single tokens"])
@pytest.mark.parametrize("window", [1, 3, 60])
def test_moved_columns_are_where_they_were_moved_to(case: str, window: int) -> None:
    """A window counts positions, also where the span is within it."""
    found = placed(*CASES[case])
    moved = placed(*CASES[case]).key_position.clone()
    moved[:, :2] -= 58
    found.moved = moved
    assert found.key_position is moved
    hidden = found.query_position[:, :, None] - moved[:, None, :] >= window
    hidden = hidden if found.hidden is None else hidden | found.hidden
    mask = found.mask(window, 1, torch.float32)
    assert mask is not None
    assert torch.equal(mask[:, 0] < 0, hidden)


def test_a_chain_unmasked_sees_all_of_itself() -> None:
    found = placed(*CASES["one chain"]).blind_before(0)
    assert found.mask(None, 1, torch.float32) is not None
    opened = found.unmasked()
    assert opened.mask(None, 1, torch.float32) is None
    assert (opened.cells, opened.span, opened.chain) == (found.cells, found.span, None)
    assert found.chain is not None


def test_a_blind_placement_keeps_no_masks_or_runs_of_the_seeing_one() -> None:
    found = placed(*CASES["one token"])
    assert found.mask(None, 1, torch.float32) is None
    runs = found.runs(None)
    blind = found.blind_before(3)
    mask = blind.mask(None, 1, torch.float32)
    assert mask is not None
    assert (mask[0, 0, 0] < 0).tolist() == [True, True, True, False, False, False]
    assert runs is not None
    assert (runs[0].tolist(), runs[1].tolist()) == ([0], [6])
    after = blind.runs(None)
    assert after is not None
    assert (after[0].tolist(), after[1].tolist()) == ([3], [3])


def test_the_padded_grid_holds_each_entry_once_and_zeros() -> None:
    found = placed(*CASES["a row between"])
    flat = torch.arange(1, 13).view(6, 2)
    grid = found.to_grid(flat)
    assert grid.shape == (3, 4, 2)
    assert grid[..., 0].tolist() == [[1, 3, 0, 0], [0, 0, 0, 0], [5, 7, 9, 11]]
    assert torch.equal(found.from_grid(grid), flat)
    full = placed(*CASES["equal rows"])
    assert full.grid is None
    assert full.to_grid(flat[:4]).tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert torch.equal(full.from_grid(full.to_grid(flat[:4])), flat[:4])
    one = placed(*CASES["one chain"])
    assert one.to_grid(flat[:3]).tolist() == [flat[:3].tolist()]


def test_masks_are_kept_by_window_groups_and_dtype() -> None:
    found = placed(*CASES["one tree"])
    for window in (None, 2):
        for groups in (1, 2):
            for dtype in (torch.float32, torch.float64):
                mask = found.mask(window, groups, dtype)
                assert mask is not None
                assert mask.dtype == dtype
                assert mask.shape == (1, 1, 4 * groups, 9)
                assert found.mask(window, groups, dtype) is mask


@pytest.mark.parametrize("case", ["one token", "one token that is no chain", "equal single tokens"])
def test_where_all_is_seen_there_is_no_mask(case: str) -> None:
    found = placed(*CASES[case])
    for window in (None, found.span, found.span + 1):
        assert found.mask(window, 1, torch.float32) is None
    assert found.mask(found.span - 1, 1, torch.float32) is not None


def test_masks_of_what_a_round_may_hold_are_kept() -> None:
    masks = ChainMasks(CAPACITY, torch.device("cpu"))
    for width, kept in ((_ROUND, True), (_ROUND + 1, False)):
        one, other = (masks.mask(width, 70, None, 1, torch.float32) for _ in range(2))
        assert one is not None
        assert other is not None
        assert (one.data_ptr() == other.data_ptr()) is kept


def test_additive_masks_lie_group_after_group() -> None:
    hidden = torch.tensor([[[False, True], [True, False]]])
    low = torch.finfo(torch.float32).min
    assert additive(hidden, 2, torch.float32).tolist() == [
        [[[0.0, low], [low, 0.0], [0.0, low], [low, 0.0]]]
    ]


def test_padding_sees_nothing_new() -> None:
    for case, row, token, want in (
        ("unequal widths", 0, 1, [1, 1, 1, 1, 1, 1, 0]),
        ("empty rows", 1, 2, [0, 0, 0]),
    ):
        mask = placed(*CASES[case]).mask(None, 1, torch.float32)
        assert mask is not None
        assert (mask[row, 0, token] == 0).int().tolist() == want


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("blind", [0, 1])
def test_everything_lies_on_the_caches_device(case: str, blind: int) -> None:
    found = placed(*CASES[case], device="meta").blind_before(blind)
    held = [found.positions, found.query_position, found.key_position]
    held += [x for x in (found.grid, found.hidden, found.starts) if x is not None]
    held += [*(found.guessed or ()), *(found.runs(None) or ()), *(found.runs(3) or ())]
    held += [] if isinstance(found.cells, slice) else [found.cells]
    for window in (None, 3):
        mask = found.mask(window, 2, torch.float64)
        held += [] if mask is None else [mask]
    assert all(x.is_meta for x in held)


def test_what_the_kernels_read_is_kept_by_window_groups_and_dtype() -> None:
    cache = KVCache(1, 12, layers=1, heads=1, head_dim=4)
    cache.advance([6])
    chain = cache.place([causal_block(3)])
    kinds = [(None, 1, torch.float32), (4, 1, torch.float32), (None, 2, torch.float32)]
    found = [chain.reads(*kind, 12) for kind in kinds]
    assert all(chain.reads(*kind, 12) is one for kind, one in zip(kinds, found, strict=True))
    assert len({id(one) for one in found}) == 3
    assert found[0].mask is not None
    assert chain.unmasked().reads(*kinds[0], 12).mask is None  # all see each other

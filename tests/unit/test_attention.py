"""Attention of a few new tokens a row: the kernel gives what torch's operator gives."""

import pytest
import torch

from drafters import native
from drafters.cache import KVCache
from drafters.placement import Block, causal_block
from drafters.tree import TokenTree

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("groups", "dim"), [(1, 16), (2, 64), (3, 20), (7, 40)])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("rows", [1, 4])
def test_every_row_reads_what_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    groups: int,
    dim: int,
    window: int | None,
    rows: int,
) -> None:
    if native.kernels(dtype, "cpu") is None:
        pytest.skip("no C compiler here")
    generator = torch.Generator().manual_seed(groups)
    cache = KVCache(rows, 40, layers=1, heads=2, head_dim=dim, dtype=dtype)
    cache.store.copy_(torch.randn(cache.store.shape, generator=generator))
    cache.advance([29, 3, 11, 0][:rows])
    blocks: list[Block | None] = [causal_block(1) for _ in range(rows)]
    if rows > 1:
        blocks[2] = None  # takes no part
    placement = cache.place(blocks)
    tokens = len(placement.positions)
    query = torch.randn(tokens, groups * 2, dim, generator=generator).to(dtype)
    query *= 4
    for place in (placement, placement.blind_before(1) if rows == 1 else placement):
        assert place.runs(window) is not None
        found = cache.attend(0, query, place, window=window)
        with monkeypatch.context() as off:
            off.setattr("drafters.cache.kernels", lambda *_: None)
            expected = cache.attend(0, query, place, window=window)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("groups", "dim"), [(1, 16), (2, 64), (3, 20), (7, 40)])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("case", ["chain", "tree", "long chain", "rows", "uneven rows"])
def test_every_node_reads_its_own_path(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    groups: int,
    dim: int,
    window: int | None,
    case: str,
) -> None:
    if native.kernels(dtype, "cpu") is None:
        pytest.skip("no C compiler here")
    generator = torch.Generator().manual_seed(groups)
    made = TokenTree(torch.arange(5), torch.tensor([-1, 0, 0, 1, 1]))
    tree = Block(made.depth, made.visible)
    blocks: list[Block | None] = {
        "chain": [causal_block(2)],
        "tree": [tree],
        "long chain": [causal_block(16)],
        "rows": [tree, tree, tree],
        "uneven rows": [causal_block(3), None, causal_block(1), tree],
    }[case]
    cache = KVCache(len(blocks), 140, layers=1, heads=2, head_dim=dim, dtype=dtype)
    cache.store.copy_(torch.randn(cache.store.shape, generator=generator))
    cache.advance([100, 3, 70, 0][: len(blocks)])
    placement = cache.place(blocks)
    query = 4 * torch.randn(len(placement.positions), groups * 2, dim, generator=generator).to(
        dtype
    )
    found = cache.attend(0, query, placement, window=window)
    with monkeypatch.context() as off:
        off.setattr("drafters.cache.kernels", lambda *_: None)
        expected = cache.attend(0, query, placement, window=window)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_scores_that_are_not_finite_spoil_their_row_alone() -> None:
    if native.kernels(torch.float32, "cpu") is None:
        pytest.skip("no C compiler here")
    cache = KVCache(2, 24, layers=1, heads=1, head_dim=8)
    cache.advance([20, 20])
    placement = cache.place([causal_block(1), causal_block(1)])
    cache.store[0, 0, 3] = torch.nan
    found = cache.attend(0, torch.ones(2, 1, 8), placement)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()

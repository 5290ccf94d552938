"""The cache: placement, masks, what a path leaves behind."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.base import Features
from drafters.cache import CacheAttention, KVCache, _free_memory, check_memory
from drafters.errors import UserError
from drafters.placement import Block, causal_block
from drafters.target import Target
from drafters.tree import TokenTree
from tests.tiny import prompts_of, tiny_target

MEMINFO = "/proc/meminfo"


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def plain_logits(target: Target, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return target.model(input_ids=torch.tensor([ids])).logits[0, -1]


def small_cache(rows: int = 2, capacity: int = 8) -> KVCache:
    return KVCache(rows, capacity, layers=1, heads=1, head_dim=4)


def test_verification_over_a_cached_prefix_uses_the_lower_right_mask() -> None:
    """New token i sees all of the prefix and new tokens 0..i; is_causal would hide the prefix."""
    cache = small_cache()
    cache.advance([3, 3])
    placement = cache.place([causal_block(2), causal_block(2)])
    mask = placement.mask(None, 1, torch.float32)
    assert mask is not None
    assert (mask[0, 0] == 0).tolist() == [[True] * 4 + [False], [True] * 5]


def test_rows_of_unequal_length_share_no_cells() -> None:
    cache = small_cache()
    cache.advance([3, 1])
    placement = cache.place([causal_block(1), causal_block(2)])
    assert placement.cell_list.tolist() == [3, 8 + 1, 8 + 2]
    assert placement.positions.tolist() == [3, 1, 2]
    mask = placement.mask(None, 1, torch.float32)
    assert mask is not None
    visible = mask[:, 0] == 0
    assert visible[0, 0].tolist() == [True] * 4
    assert visible[1].tolist() == [[True, True, False, False], [True, True, True, False]]


def test_heads_that_share_keys_are_folded_in_order() -> None:
    """Grouped-query attention equals repeating the keys."""
    torch.manual_seed(0)
    cache = KVCache(2, 8, layers=1, heads=2, head_dim=4)
    placement = cache.place([causal_block(3), causal_block(2)])
    query, key, value = torch.randn(5, 6, 4), torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    cache.write(0, key, value, placement)
    out = cache.attend(0, query, placement)
    for rows in (slice(0, 3), slice(3, 5)):
        q, k, v = (x[rows].transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(3, 0), v.repeat_interleave(3, 0)
        want = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True
        )[0]
        assert torch.allclose(out[rows], want.transpose(0, 1).flatten(1), atol=1e-6)


def test_sliding_window_counts_positions_not_columns() -> None:
    cache = small_cache(1, 16)
    cache.advance([4])
    tree = TokenTree.from_paths(0, [[1], [2], [3]])
    placement = cache.place([Block(tree.depth, tree.visible)])
    mask = placement.mask(3, 1, torch.float32)
    assert mask is not None
    # the third sibling sits at position 5 in column 7: it sees positions 3, 4 and itself
    assert (mask[0, 0, 3] == 0).nonzero().flatten().tolist() == [3, 4, 7]


def test_a_kept_path_equals_a_plain_forward(target: Target) -> None:
    """After a branch was accepted the cache is what a plain run leaves."""
    cache = target.new_cache(2, 64)
    first, second = (torch.tensor(p) for p in prompts_of(9, 4))
    target.prefill([first, second], cache, Features())
    tree = TokenTree.from_paths(7, [[1, 2], [3, 4, 5], [6]])
    node = next(n for n in range(len(tree)) if len(tree.path(n)) == 4)
    target.forward_trees([tree, TokenTree.chain([8, 9])], cache, Features())
    cache.keep([tree.path(node), [0]])
    assert cache.lengths.tolist() == [9 + 4, 4 + 1]
    outputs = target.forward_trees(
        [TokenTree.chain([11]), TokenTree.chain([12])], cache, Features()
    )
    for output, ids in zip(
        outputs,
        ([*first.tolist(), 7, 3, 4, 5, 11], [*second.tolist(), 8, 12]),
        strict=True,
    ):
        assert output is not None
        assert torch.allclose(output.logits[0], plain_logits(target, ids), atol=1e-3)


def test_long_prompts_are_taken_in_chunks(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafters.target.PREFILL_CHUNK", 8)
    long, short = (torch.tensor(p) for p in prompts_of(21, 3))
    cache = target.new_cache(2, 32)
    features = Features(layers=(1,), last=True)
    outputs = target.prefill([long, short], cache, features)
    for output, ids in zip(outputs, (long, short), strict=True):
        assert output is not None
        assert output.taps is not None
        assert output.last is not None
        assert len(output.taps) == len(output.last) == len(ids)
        assert torch.allclose(output.logits[0], plain_logits(target, ids.tolist()), atol=1e-3)


def test_taps_are_raw_layer_outputs(target: Target) -> None:
    ids = torch.tensor(prompts_of(6)[0])
    with torch.no_grad():
        states = target.model(input_ids=ids[None], output_hidden_states=True).hidden_states
    output = target.prefill([ids], target.new_cache(1, 8), Features((0, 2), last=True))[0]
    assert output is not None
    assert output.taps is not None
    assert output.last is not None
    expected = torch.cat((states[1], states[3]), -1)[0]
    assert (output.taps - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.allclose(output.last, states[-1][0], atol=1e-4)


def test_packed_documents_equal_separate_ones(target: Target) -> None:
    first, second = prompts_of(7, 5)
    ids = torch.tensor([[*first, *second, 0]])
    document = torch.tensor([[0] * 7 + [1] * 5 + [-1]])
    position = torch.tensor([[*range(7), *range(5), 0]])
    taps, last = target.forward_batch(ids, document, position, Features((1,)))
    for span, alone in ((slice(0, 7), first), (slice(7, 12), second)):
        own = torch.tensor([alone])
        doc, pos = torch.zeros_like(own), torch.arange(len(alone))[None]
        want_taps, want = target.forward_batch(own, doc, pos, Features((1,)))
        assert torch.allclose(last[0, span], want[0], atol=1e-4)
        assert taps is not None
        assert want_taps is not None
        assert torch.allclose(taps[0, span], want_taps[0], rtol=1e-4, atol=1e-3)


def test_a_full_cache_is_refused() -> None:
    cache = small_cache()
    cache.advance([7, 0])
    with pytest.raises(UserError, match="needs 9 tokens but the cache holds 8"):
        cache.place([causal_block(2), None])


def test_memory_is_checked_before_it_is_taken() -> None:
    with pytest.raises(UserError, match=r"a cache of 100000 rows x 1000000 tokens needs .* GiB"):
        KVCache(100_000, 1_000_000, layers=30, heads=3, head_dim=64)


@pytest.mark.parametrize("width", [1, 3, 70])
@pytest.mark.parametrize("window", [None, 2, 5, 200])
def test_a_rows_chain_takes_its_mask_from_one_template(width: int, window: int | None) -> None:
    """What is cut out of the template equals what is built token by token."""
    cache = small_cache(2, 90)
    for length in (0, 4, 17):
        cache.lengths[1] = length
        chain = causal_block(width)
        placements = [
            cache.place([None, block])
            for block in (chain, Block(chain.offset, chain.visible.clone()))
        ]
        found, built = (p.mask(window, 2, torch.float32) for p in placements)
        assert placements[0].chain is not None
        assert placements[1].chain is None
        assert torch.equal(placements[0].positions, placements[1].positions)
        assert placements[0].cells == placements[1].cells
        assert torch.equal(placements[0].key_position, placements[1].key_position)
        if found is None:
            assert built is None or bool((built == 0).all())
        else:
            assert built is not None
            assert torch.equal(found, built)


def test_masks_and_positions_of_a_chain_are_built_once() -> None:
    cache = small_cache(1, 32)
    masks = []
    for _ in range(3):
        placement = cache.place([causal_block(4)])
        masks.append(placement.mask(None, 3, torch.float32))
        assert placement.positions.data_ptr() == cache.masks.columns[cache.lengths[0] :].data_ptr()
        cache.advance([2])
    storages = {mask.untyped_storage().data_ptr() for mask in masks if mask is not None}
    assert len(storages) == 1


def test_padding_moves_no_keys_position() -> None:
    """The shorter row's padding lies beyond what the longer one reads."""
    cache = small_cache(2, 16)
    cache.advance([5, 2])
    placement = cache.place([causal_block(3), causal_block(4)])
    assert placement.span == 8
    assert placement.key_position[0].tolist() == list(range(8))
    assert placement.key_position[1, :6].tolist() == list(range(6))


def numbered(rows: int = 3, capacity: int = 6) -> KVCache:
    """A cache whose cells hold their own numbers, keys as they are and values negative."""
    cache = KVCache(rows, capacity, layers=2, heads=2, head_dim=3)
    number = torch.arange(rows * capacity + 1.0)
    cache.store[:, 0] = number[None, :, None, None]
    cache.store[:, 1] = -number[None, :, None, None]
    return cache


def columns_of(cache: KVCache) -> list[list[int]]:
    """Return the number that each cell of each row holds; all layers, heads and widths agree."""
    held = cache.store[:, :, :-1]
    assert torch.equal(held[:, 0], -held[:, 1])
    assert bool((held[:, :1] == held[:1, :1, :, :1, :1]).all())
    return held[0, 0, :, 0, 0].int().view(cache.rows, cache.capacity).tolist()


def test_a_kept_path_moves_down_and_nothing_else_does() -> None:
    cache = numbered()
    cache.advance([1, 2, 0])
    cache.keep([[0, 2, 4], None, [0, 3]])
    assert cache.lengths.tolist() == [4, 2, 2]
    assert columns_of(cache) == [
        [0, 1, 3, 5, 4, 5],
        [6, 7, 8, 9, 10, 11],
        [12, 15, 14, 15, 16, 17],
    ]
    cache.keep([[0], [1, 3], [2]])  # a path that leaves out even the first
    assert cache.lengths.tolist() == [5, 4, 3]
    assert columns_of(cache) == [
        [0, 1, 3, 5, 4, 5],
        [6, 7, 9, 11, 10, 11],
        [12, 15, 16, 15, 16, 17],
    ]


def test_a_wiped_row_is_zero_beyond_its_tokens() -> None:
    cache = numbered()
    cache.advance([4, 2, 6])
    cache.wipe(1)
    assert columns_of(cache)[1] == [6, 7, 0, 0, 0, 0]
    assert [columns_of(cache)[row] for row in (0, 2)] == [
        [0, 1, 2, 3, 4, 5],
        [12, 13, 14, 15, 16, 17],
    ]
    assert cache.store[0, 0, -1, 0, 0] == 18
    cache.reset(0)
    assert cache.lengths.tolist() == [0, 2, 6]
    cache.wipe(0)
    assert columns_of(cache)[:2] == [[0] * 6, [6, 7, 0, 0, 0, 0]]


def test_what_is_written_is_read_where_it_was_placed() -> None:
    cache = KVCache(3, 6, layers=2, heads=2, head_dim=3)
    cache.advance([1, 4, 2])
    for blocks in ([None, causal_block(2), causal_block(1)], [None, None, causal_block(3)]):
        placement = cache.place(blocks)
        count = len(placement.positions)
        keys = torch.randn(count, 2, 3)
        cache.write(1, keys, -keys, placement)
        own = placement.cells
        assert torch.equal(cache.store[1, 0, own], keys)
        assert torch.equal(cache.store[1, 1, own], -keys)
        found = cache.read(1, placement)
        rows = placement.rows
        assert found[0].shape == (rows.stop - rows.start, 2, placement.span, 3)
        for kind in (0, 1):
            held = cache.store[1, kind, :-1].view(3, 6, 2, 3)[rows, : placement.span]
            assert torch.equal(found[kind], held.transpose(1, 2))
            assert found[kind].data_ptr() == held.data_ptr()
    assert bool((cache.store[0] == 0).all())
    assert bool((cache.store[1, :, :6] == 0).all())


FORK = TokenTree.from_paths(0, [[1, 2], [3]])
SHAPES = {
    "tokens": [causal_block(1), causal_block(1)],
    "chains": [causal_block(3), causal_block(2)],
    "pairs": [causal_block(2), causal_block(2)],
    "trees": [Block(FORK.depth, FORK.visible), causal_block(1)],
    "one row": [None, causal_block(3)],
    "one token": [causal_block(1), None],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 3])
def test_attention_is_the_softmax_over_what_is_seen(
    monkeypatch: pytest.MonkeyPatch, shape: str, window: int | None
) -> None:
    """Head by head and token by token; query heads 0 to 2 read key head 0, 3 to 5 head 1."""
    monkeypatch.setattr("drafters.cache.kernels", lambda *_: None)
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(2, 12, layers=2, heads=2, head_dim=4)
    cache.store.copy_(torch.randn(cache.store.shape, generator=generator))
    cache.advance([5, 2])
    placement = cache.place(SHAPES[shape])
    query = torch.randn(len(placement.positions), 6, 4, generator=generator)
    found = cache.attend(1, query, placement, window=window)
    mask = placement.mask(window, 1, torch.float32)
    place = 0
    for row, block in enumerate(SHAPES[shape]):
        for token in range(0 if block is None else len(block.offset)):
            hidden = 0.0 if mask is None else mask[row - placement.rows.start, 0, token]
            for head in range(6):
                keys, values = (
                    cache.store[1, kind, row * 12 : row * 12 + placement.span, head // 3]
                    for kind in (0, 1)
                )
                scores = keys @ query[place, head] * 0.5 + hidden
                want = scores.softmax(0) @ values
                torch.testing.assert_close(found[place, 4 * head : 4 * head + 4], want)
            place += 1
    assert found.shape == (place, 24)


def test_a_kernel_is_given_runs_and_the_usual_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Kernel:
        def attend(self, *given: Any) -> torch.Tensor:
            asked[:] = given
            return torch.full((given[0].shape[0], 24), 7.0)

    def kernels(dtype: torch.dtype, device: str) -> Kernel:
        assert (dtype, device) == (torch.float64, "cpu")
        return Kernel()

    monkeypatch.setattr("drafters.cache.kernels", kernels)
    cache = KVCache(2, 30, layers=2, heads=2, head_dim=4, dtype=torch.float64)
    cache.advance([5, 2])
    placement = cache.place([causal_block(1), causal_block(1)])
    query = torch.randn(2, 6, 4, dtype=torch.float64)
    assert bool((cache.attend(1, query, placement, window=3) == 7).all())
    given, (keys, values), reads, factor = asked
    assert given is query
    assert keys.data_ptr() == cache.store[1, 0].data_ptr()
    assert values.data_ptr() == cache.store[1, 1].data_ptr()
    assert keys.shape == values.shape == (61, 2, 4)
    tokens, *runs, mask = reads.kept
    assert [part.tolist() for part in runs] == [[3, 30], [3, 3]]
    assert (reads.rows, reads.width, tokens, mask) == (2, 1, None, None)
    assert reads is placement.reads(3, 3, torch.float64, 30)
    assert factor == 0.5

    placement = cache.place([None, causal_block(2)])
    assert cache.attend(1, query, placement).shape == (2, 24)
    given, _, reads, _ = asked
    assert given is query
    tokens, *runs, mask = reads.kept
    assert (reads.rows, reads.width, tokens) == (1, 2, None)
    assert [part.tolist() for part in runs] == [[30], [4]]
    assert mask.shape == (1, 1, 3 * 2, 4)
    assert (mask[0, 0, :2] < 0).tolist() == [[False, False, False, True], [False] * 4]

    placement = cache.place([causal_block(2), causal_block(1)])
    assert cache.attend(1, torch.randn(3, 6, 4).double(), placement).shape == (3, 24)
    tokens, *runs, mask = asked[2].kept
    assert tokens.tolist() == [0, 1, 2, -1]  # the second row is padded
    assert [part.tolist() for part in runs] == [[0, 30], [7, 7]]
    assert mask.shape == (2, 1, 3 * 2, 7)
    asked.clear()
    many = cache.place([causal_block(17), None])
    assert cache.attend(1, torch.randn(17, 6, 4).double(), many).shape == (17, 24)
    assert asked == []  # torch's


def test_a_cache_is_zeros_of_its_type_with_one_cell_to_spare() -> None:
    cache = KVCache(2, 3, layers=4, heads=5, head_dim=6, dtype=torch.bfloat16)
    assert cache.store.shape == (4, 2, 7, 5, 6)
    assert cache.store.dtype == torch.bfloat16
    assert not cache.store.any()
    assert (cache.rows, cache.capacity, cache.heads, cache.head_dim, cache.unread) == (
        2,
        3,
        5,
        6,
        6,
    )
    assert cache.lengths.tolist() == [0, 0]
    assert cache.lengths.dtype == torch.int64
    assert (cache.masks.capacity, cache.masks.device) == (3, torch.device("cpu"))
    assert KVCache(1, 1, layers=1, heads=1, head_dim=1).store.dtype == torch.float32


def test_a_cache_may_be_filled_to_its_capacity() -> None:
    cache = small_cache()
    cache.advance([7, 8])
    assert cache.place([causal_block(1), None]).span == 8
    with pytest.raises(UserError) as raised:
        cache.place([causal_block(2), None])
    assert str(raised.value) == (
        "a row needs 9 tokens but the cache holds 8: ask for fewer new tokens or a larger capacity"
    )
    with pytest.raises(ValueError, match="zip"):
        cache.place([causal_block(1)])


def test_paths_of_another_device_are_moved_there() -> None:
    cache = KVCache(1, 8, layers=1, heads=1, head_dim=2, device="meta")
    assert cache.store.is_meta
    cache.place([causal_block(3)])
    cache.keep([[0, 2]])
    assert cache.lengths.tolist() == [2]


def test_memory_is_what_the_states_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory is asked of the device; where nobody knows it, all goes."""
    free: list[int | None] = [2 * 2**30]
    monkeypatch.setattr("drafters.cache._free_memory", lambda device: free[0])
    cpu = torch.device("cpu")
    check_memory(2 * 2**30, cpu, "this")
    with pytest.raises(UserError) as raised:
        check_memory(2 * 2**30 + 2**29, cpu, "this")
    assert str(raised.value) == (
        "this needs 2.5 GiB, 2.0 GiB are free: use fewer rows or fewer tokens"
    )
    free[0] = None
    check_memory(2**60, cpu, "this")

    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr("drafters.cache.check_memory", lambda *given: asked.append(given))
    KVCache(2, 3, layers=4, heads=5, head_dim=6, dtype=torch.bfloat16)
    assert asked == [(4 * 2 * 7 * 5 * 6 * 2, cpu, "a cache of 2 rows x 3 tokens")]


def test_free_memory_is_read_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "MemTotal:       9 kB\nMemAvailable:   123 kB (a:b)\nOdd: a:b c\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text if str(self) == MEMINFO else "")
    assert _free_memory(torch.device("cpu")) == 123 * 1024

    def missing(self: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert _free_memory(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (device.index, 0))
    assert _free_memory(torch.device("cuda:1")) == 1


@pytest.mark.parametrize("window", [None, 3])
def test_a_layer_stores_and_then_reads_within_its_window(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(1, 12, layers=2, heads=1, head_dim=4)
    cache.store.copy_(torch.randn(cache.store.shape, generator=generator))
    cache.advance([6])
    placement = cache.place([causal_block(2)])
    query, key, value = torch.randn(3, 2, 1, 4, generator=generator)
    found = CacheAttention(cache, 1, placement, window)(query, key, value)
    keys, values = (part[0, 0] for part in cache.read(1, placement))
    assert torch.equal(keys[6:], key[:, 0])
    assert torch.equal(values[6:], value[:, 0])
    for place, column in enumerate((6, 7)):
        seen = slice(0 if window is None else column - window + 1, column + 1)
        weights = (keys[seen] @ query[place, 0] / 2).softmax(0)
        assert torch.allclose(found[place], weights @ values[seen], atol=1e-5)

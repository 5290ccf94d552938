"""The cache: placement, masks, what a path leaves behind."""

import pytest
import torch

from drafters.base import Features
from drafters.cache import KVCache
from drafters.errors import UserError
from drafters.placement import Block, causal_block
from drafters.target import Target
from drafters.tree import TokenTree
from tests.tiny import prompts_of, tiny_target


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
    assert placement.cells.tolist() == [3, 8 + 1, 8 + 2]
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

"""A decoder layer in one call of the kernels gives what its parts give one by one."""

import pytest
import torch

from drafters import native
from drafters.cache import CacheAttention, KVCache
from drafters.layers import DecoderLayer, LayerKind, Rotary, packed_layer
from drafters.native import Kernels
from drafters.placement import Block, causal_block
from drafters.shape import TargetShape
from drafters.tree import TokenTree

# no width is a multiple of the panels, nor hidden_size of the heads
SHAPE = TargetShape(38, 54, 1, 6, 2, 10, 64, 256, rope={"rope_theta": 1e4})
KINDS = {
    "plain": LayerKind(),
    "wide": LayerKind(wide=True),
    "wide, normed residual": LayerKind(wide=True, normed_residual=True),
    "no input norm": LayerKind(input_norm=False),
    "normed heads, biases": LayerKind(qk_norm=True, bias=True),
}
TREE = TokenTree(torch.arange(5), torch.tensor([-1, 0, 0, 1, 1]))
NODES = Block(TREE.depth, TREE.visible)
BLOCKS: dict[str, list[Block | None]] = {
    "token": [causal_block(1), None],
    "chain": [None, causal_block(3)],
    "trees": [NODES, NODES],
    "uneven": [causal_block(1), NODES],
    "rows": [causal_block(1), causal_block(1)],
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_a_layer_is_the_sum_of_its_parts(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str, blocks: str
) -> None:
    if native.kernels(dtype, "cpu") is None:
        pytest.skip("no C compiler here")
    torch.manual_seed(0)
    trained = DecoderLayer(SHAPE, KINDS[kind])
    for weight in trained.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    layer = packed_layer(trained, dtype)
    cache = KVCache(2, 30, layers=2, heads=2, head_dim=10, dtype=dtype)
    cache.store.normal_()
    cache.advance([19, 4])
    placement = cache.place(BLOCKS[blocks])
    tokens = len(placement.positions)
    x, embedding = torch.randn(2, tokens, 38).to(dtype)
    rotary = Rotary(SHAPE)(placement.positions, dtype)
    found, stores, calls = [], [], []

    def counted(self: Kernels, *given: object) -> torch.Tensor:
        calls.append(given)
        return whole(self, *given)  # type: ignore[arg-type]

    whole = Kernels.layer
    monkeypatch.setattr(Kernels, "layer", counted)
    for window in (None, 4):
        attend = CacheAttention(cache, 1, placement, window)
        for attention in (attend, lambda *given: attend(*given)):  # noqa: B023
            before = cache.store.clone()
            beside = embedding if KINDS[kind].wide else None
            found.append(layer(x, rotary, attention, beside))
            stores.append(cache.store.clone())
            cache.store.copy_(before)
    assert len(calls) == 2  # the others took the layer apart
    for at_once, apart in (found[:2], found[2:], stores[:2], stores[2:]):
        assert at_once.dtype == dtype
        torch.testing.assert_close(at_once, apart, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not torch.equal(stores[0], cache.store)

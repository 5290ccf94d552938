"""Rotary phases, the decoder layer and its packed copy."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.base import Features
from drafters.errors import UserError
from drafters.layers import DecoderLayer, LayerKind, Rotary, packed_layer
from drafters.shape import TargetShape
from tests.tiny import tiny_target

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
SHAPE = TargetShape(
    hidden_size=64,
    intermediate_size=96,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=128,
    max_positions=256,
    rope=ROPES["default"],
)
KINDS = {
    "plain": LayerKind(),
    "wide": LayerKind(wide=True),
    "qwen2": LayerKind(bias=True),
    "qwen3": LayerKind(qk_norm=True),
    "all": LayerKind(wide=True, qk_norm=True, bias=True, normed_residual=True),
}


def causal_attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Plain causal attention over [B, T, H, hd], the textbook way."""
    groups = query.shape[2] // key.shape[2]
    q, k, v = (
        x.transpose(1, 2)
        for x in (query, key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2))
    )
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


def flat_attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same over one sequence [T, H, hd]."""
    return causal_attend(query[None], key[None], value[None])[0]


@pytest.mark.parametrize("name", ROPES)
def test_a42_rotary_phases_are_the_targets(name: str) -> None:
    target = tiny_target(rope_parameters=ROPES[name])
    cos, sin = target.model.base_model.rotary_emb(torch.zeros(1), torch.tensor([[0, 3, 200]]))
    ours, signed = Rotary(target.shape)(torch.tensor([0, 3, 200]))
    torch.testing.assert_close(ours[:, 0], cos[0])
    half = sin.shape[-1] // 2
    torch.testing.assert_close(signed[:, 0, half:], sin[0, :, half:])
    torch.testing.assert_close(signed[:, 0, :half], -sin[0, :, :half])


def test_a42_scaled_phases_differ_from_plain_ones() -> None:
    position = torch.tensor([200])
    plain = Rotary(replace(SHAPE, rope={**ROPES["default"], "rope_theta": 10000.0}))(position)[0]
    for name in ("linear", "llama3", "yarn"):
        assert not torch.allclose(plain, Rotary(replace(SHAPE, rope=ROPES[name]))(position)[0])


def test_rotary_reads_the_full_attention_set_where_there_are_several() -> None:
    several = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        "full_attention": ROPES["linear"],
    }
    expected = Rotary(replace(SHAPE, rope=ROPES["linear"])).frequency
    assert torch.equal(Rotary(replace(SHAPE, rope=several)).frequency, expected)


def test_rotary_that_changes_with_the_length_is_refused() -> None:
    shape = replace(SHAPE, rope={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(UserError, match=r"rope type is 'dynamic'.*default, linear, llama3, yarn"):
        Rotary(shape)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "plain"), ("mistral", "plain"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_a_copied_layer_computes_what_the_targets_does(family: str, kind: str) -> None:
    target = tiny_target(family)
    layer = DecoderLayer(target.shape, KINDS[kind])
    layer.copy_from(target.layer_state(2))
    ids = torch.randint(128, (2, 12))
    position = torch.arange(12).expand(2, 12)
    taps, _ = target.forward_batch(ids, torch.zeros_like(ids), position, Features((1, 2)))
    assert taps is not None
    before, after = taps.chunk(2, -1)
    out = layer(before, Rotary(target.shape)(position), causal_attend)
    torch.testing.assert_close(out, after, atol=1e-4, rtol=1e-4)


def _random(shape: TargetShape, kind: LayerKind) -> DecoderLayer:
    layer = DecoderLayer(shape, kind)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def _inputs(count: tuple[int, ...]) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    position = torch.arange(count[-1]).expand(count)
    return torch.randn(*count, 64), Rotary(SHAPE)(position), torch.randn(*count, 64)


@pytest.mark.parametrize("name", KINDS)
def test_the_packed_layer_equals_the_trainable_one(name: str) -> None:
    kind = KINDS[name]
    layer = _random(SHAPE, kind)
    packed = packed_layer(layer, torch.float32)
    x, rotary, embedding = _inputs((2, 7))
    given = embedding if kind.wide else None
    expected = layer(x, rotary, causal_attend, given)
    flat_rotary = (rotary[0].flatten(0, 1), rotary[1].flatten(0, 1))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = (t.unflatten(0, (2, 7)) for t in (query, key, value))
        return causal_attend(*rows).flatten(0, 1)

    out = packed(x.flatten(0, 1), flat_rotary, attend, embedding.flatten(0, 1))
    torch.testing.assert_close(out, expected.detach().flatten(0, 1), atol=1e-5, rtol=1e-5)


def test_training_does_not_reach_a_packed_layer() -> None:
    layer = _random(SHAPE, KINDS["all"])
    packed = packed_layer(layer, torch.float32)
    x, rotary, embedding = _inputs((5,))
    before = packed(x, rotary, flat_attend, embedding)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2)
    assert torch.equal(packed(x, rotary, flat_attend, embedding), before)


@pytest.mark.parametrize("embedding", ["zero", "target", "random"])
def test_a_wide_layer_reads_the_hidden_state_as_the_target_does(embedding: str) -> None:
    target = tiny_target()
    layer = DecoderLayer(target.shape, LayerKind(wide=True))
    before = layer.qkv.weight.detach().clone()
    state = target.layer_state(3)
    layer.copy_from(state, embedding)
    stacked = torch.cat([state[f"self_attn.{x}_proj.weight"] for x in "qkv"])
    first, second = layer.qkv.weight.detach().chunk(2, -1)
    assert torch.equal(second, stacked)
    expected = {"zero": torch.zeros_like(stacked), "target": stacked}
    assert torch.equal(first, expected.get(embedding, before.chunk(2, -1)[0]))
    assert torch.equal(layer.hidden_norm.weight, state["input_layernorm.weight"])


def test_what_does_not_fit_stays_as_it_is() -> None:
    layer = DecoderLayer(replace(SHAPE, intermediate_size=80), LayerKind())
    target = tiny_target()
    down, out = layer.down.weight.detach().clone(), layer.out.weight.detach().clone()
    layer.copy_from(target.layer_state(0))
    assert torch.equal(layer.down.weight, down)
    assert not torch.equal(layer.out.weight, out)
    names = {f"other.{name}": value for name, value in target.layer_state(1).items()}
    out = layer.out.weight.detach().clone()
    layer.copy_from(names)
    assert torch.equal(layer.out.weight, out)


def test_a41_heads_need_not_fill_the_hidden_width() -> None:
    target = tiny_target("qwen3", head_dim=32)
    assert target.shape.head_dim == 32
    layer = DecoderLayer(target.shape, LayerKind(wide=True, qk_norm=True))
    assert layer.qkv.weight.shape == ((4 + 2 * 2) * 32, 128)
    assert layer.out.weight.shape == (64, 4 * 32)
    layer.copy_from(target.layer_state(0))
    x = torch.randn(1, 5, 64)
    out = layer(x, Rotary(target.shape)(torch.arange(5)[None]), causal_attend, x)
    assert out.shape == x.shape
    assert out.isfinite().all()


def test_the_normed_residual_replaces_the_raw_one() -> None:
    layer = _random(SHAPE, LayerKind(wide=True, normed_residual=True))
    with torch.no_grad():
        layer.out.weight.zero_()
        layer.down.weight.zero_()
    x, rotary, embedding = _inputs((1, 4))
    expected = F.rms_norm(x, (64,), layer.hidden_norm.weight, SHAPE.norm_epsilon)
    torch.testing.assert_close(layer(x, rotary, causal_attend, embedding), expected)


def test_bfloat16_copy_stays_close() -> None:
    layer = _random(SHAPE, KINDS["all"])
    packed = packed_layer(layer, torch.bfloat16)
    x, rotary, embedding = _inputs((6,))
    halves = [t.bfloat16() for t in (x, *rotary, embedding)]
    out = packed(halves[0], (halves[1], halves[2]), flat_attend, halves[3])
    expected = layer(x, rotary, flat_attend, embedding)
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).abs().max() < 0.05 * expected.abs().max()

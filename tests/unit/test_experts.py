"""Mixtures of experts: which weights a forward reads."""

from fractions import Fraction
from itertools import product

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from drafters.growth import Chain
from drafters.registry import build_drafter
from drafters.target import Target
from inference import generate
from inference.experts import expected_experts, experts_hit, routers
from inference.meter import CostMeter
from tests.tiny import prompts_of, tiny_target


@pytest.fixture(scope="module")
def mixture() -> Target:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Target(Qwen3MoeForCausalLM(config).eval(), name="mixture", engine="reference")


def test_expected_experts_are_those_of_even_routing() -> None:
    """Three tokens that choose one of four experts each: all outcomes counted."""
    outcomes = list(product(range(4), repeat=3))
    exact = Fraction(sum(len(set(o)) for o in outcomes), len(outcomes))
    assert expected_experts(3, 4, 1) == pytest.approx(float(exact))
    assert expected_experts(1, 8, 2) == 2


def test_more_tokens_hit_more_experts(mixture: Target) -> None:
    assert len(routers(mixture)) == 2
    hooks = [len(module._forward_hooks) for module in routers(mixture)]
    (prefix,) = prompts_of(40)
    found = experts_hit(CostMeter(mixture, prefix, rows=1, sizes=(1, 2, 8, 32)))
    assert list(found) == [1, 2, 8, 32]
    assert found[1] == 2.0  # every token chooses two
    assert 2 <= found[2] <= 4
    assert found[1] < found[8] <= found[32] <= 8
    assert [len(module._forward_hooks) for module in routers(mixture)] == hooks


def test_a_dense_target_has_no_experts() -> None:
    target = tiny_target(num_hidden_layers=1)
    assert routers(target) == []
    assert experts_hit(CostMeter(target, [1, 2, 3], sizes=(1, 2))) == {}


def test_a_mixture_decodes_as_plain(mixture: Target) -> None:
    prompts = prompts_of(8, 3)
    plain = generate(mixture, build_drafter("none", {}, mixture.shape), prompts, max_new_tokens=12)
    drafter = build_drafter("ngram", {}, mixture.shape)
    drafted = generate(mixture, drafter, prompts, growth=Chain(3), max_new_tokens=12)
    assert [o.ids for o in drafted] == [o.ids for o in plain]

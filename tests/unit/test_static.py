"""The lean forward at fixed shapes equals the lean forward, and touches nothing it should not."""

from functools import cache

import pytest
import torch

from drafters.base import Features
from drafters.cache import KVCache
from drafters.errors import UserError
from drafters.growth import Chain, Static
from drafters.registry import build_drafter
from drafters.static import SPAN_STEP, WIDTHS, StaticModel
from drafters.target import Target
from drafters.tree import TokenTree
from inference import generate
from tests.tiny import ScriptedDrafter, prompts_of, tiny_target

FAMILIES = {"llama": {}, "mistral": {"sliding_window": 6}, "qwen3": {}}
FEATURES = Features((1,), last=True)
FORK = TokenTree.from_paths(3, [[1, 2], [4, 5, 6], [7]])


@cache
def pair(family: str) -> tuple[Target, Target]:
    fast, static = (tiny_target(family, engine=e, **FAMILIES[family]) for e in ("fast", "static"))
    assert (fast.engine, static.engine) == ("fast", "static")
    return fast, static


def filled(target: Target, lengths: tuple[int, ...]) -> KVCache:
    cache = target.new_cache(len(lengths), 40)
    target.prefill([torch.tensor(p) for p in prompts_of(*lengths)], cache, FEATURES)
    return cache


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "trees",
    [
        [None, TokenTree.chain([9]), None],
        [TokenTree.chain([5]), TokenTree.chain([9]), TokenTree.chain([2])],
        [FORK, None, TokenTree.chain([5, 6, 7])],
        [None, FORK, FORK],
    ],
    ids=["a root", "roots", "a gap", "trees"],
)
def test_padded_rounds_equal_plain_ones(family: str, trees: list[TokenTree | None]) -> None:
    found = []
    for target in pair(family):
        cache = filled(target, (7, 12, 3))
        found.append(target.forward_trees(trees, cache, FEATURES))
    for fast, static in zip(*found, strict=True):
        assert (fast is None) == (static is None)
        if fast is not None and static is not None:
            for name in ("logits", "taps", "last"):
                one, other = getattr(fast, name), getattr(static, name)
                torch.testing.assert_close(one, other, atol=3e-3, rtol=1e-3)  # logits lie far apart


def test_rows_that_take_no_part_keep_all_they_have() -> None:
    """Guesses of the other rows too: one row may run again before the rest is committed."""
    target = tiny_target(engine="static")
    cache = filled(target, (7, 12, 3))
    target.forward_trees([FORK, FORK, FORK], cache, FEATURES)
    before = cache.store.clone()
    target.forward_trees([None, TokenTree.chain([1, 2, 3]), None], cache, FEATURES)
    changed = (cache.store != before).flatten(3).any(-1).any(0).any(0).nonzero().flatten().tolist()
    written = range(40 + 12, 40 + 12 + 3)
    assert set(changed) <= {*written, cache.unread}
    assert cache.unread == 3 * 40


@pytest.mark.parametrize("growth", [Chain(3), Static((2, 2))], ids=str)
def test_greedy_outputs_are_the_same(growth: Chain | Static) -> None:
    prompts = prompts_of(13, 5, 1)
    fast, static = pair("llama")
    none = build_drafter("none", {}, fast.shape)
    truth = [one.ids for one in generate(fast, none, prompts, max_new_tokens=17)]
    drafter = ScriptedDrafter(truth, [2, 0, 3, 1], siblings=int(isinstance(growth, Static)))
    for chosen in (none, drafter):
        outputs = generate(static, chosen, prompts, growth=growth, max_new_tokens=17)
        assert [one.ids for one in outputs] == truth


def test_few_shapes_serve_many_rounds() -> None:
    target = tiny_target(engine="static", max_position_embeddings=1024)
    model = target._model
    assert isinstance(model, StaticModel)
    cache = target.new_cache(1, 600)
    for length in (3, 100, 250, 257, 400):
        cache.lengths[0] = length
        for size in (1, 2, 3, 4):
            target.forward_trees([TokenTree.chain([1] * size)], cache, Features())
    keys = set(model._shapes[cache])
    assert keys == {(w, s, ()) for w in (1, 2, 4) for s in (SPAN_STEP, 2 * SPAN_STEP)}
    before = len(keys)
    cache.lengths[0] = 0
    target.prefill([torch.ones(WIDTHS[-1] + 1, dtype=torch.int64)], cache, Features())
    assert len(model._shapes[cache]) == before  # a long prompt is not padded


def test_a_family_without_lean_forward_has_no_fixed_shapes() -> None:
    with pytest.raises(UserError, match="cannot run on the static engine: model type gpt2 has no"):
        tiny_target("gpt2", engine="static")
    with pytest.raises(UserError, match="engine is 'fats': give fast, reference, static"):
        tiny_target(engine="fats")


@pytest.mark.gpu
def test_a_graph_replays_what_was_captured() -> None:
    found = []
    for target in pair("llama"):
        target = Target(target.model.to("cuda"), engine=target.engine)
        cache = target.new_cache(1, 40)
        target.prefill([torch.tensor(prompts_of(7)[0])], cache, FEATURES)
        for tokens in ([1, 2], [3, 4], [5, 6]):
            out = target.forward_trees([TokenTree.chain(tokens)], cache, FEATURES)[0]
            assert out is not None
            cache.keep([[0, 1]])
            found.append(out.logits)
    for fast, static in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(fast, static, atol=1e-4, rtol=1e-4)

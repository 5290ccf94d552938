"""Frontiers in a drafter's cache: every node reads its own path and nothing else."""

from functools import cache

import pytest
import torch
from torch import Tensor

from drafters.base import Features
from drafters.cache import KVCache
from drafters.errors import UserError
from drafters.frontier import Frontier, FrontierCells
from drafters.target import Target
from tests.tiny import prompts_of, tiny_target

FAMILIES = {"llama": {}, "mistral": {"sliding_window": 6}, "gpt2": {}}


@cache
def target_of(family: str) -> Target:
    engine = "reference" if family == "gpt2" else "fast"
    return tiny_target(family, engine=engine, **FAMILIES[family])


def filled(target: Target, prompts: list[list[int]]) -> KVCache:
    cache = target.new_cache(len(prompts), 40)
    target.prefill([torch.tensor(p) for p in prompts], cache, Features())
    return cache


def after(target: Target, texts: list[list[int]]) -> list[Tensor]:
    """Return the logits after each text, from nothing."""
    cache = target.new_cache(len(texts), 60)
    outs = target.prefill([torch.tensor(text) for text in texts], cache, Features())
    return [out.logits[0] for out in outs if out is not None]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [[1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("sizes", [[1, 1, 1], [1, 3, 2], [2, 4, 4]])
def test_a_node_reads_its_path(family: str, rows: list[int], sizes: list[int]) -> None:
    target = target_of(family)
    prompts = prompts_of(9, 4, 12)
    cache = filled(target, prompts)
    cells = FrontierCells(cache, rows)
    generator = torch.Generator().manual_seed(sum(sizes) + len(rows))
    paths: list[list[list[int]]] = [[[]] for _ in rows]
    for depth, size in enumerate(sizes, start=1):
        tokens = torch.randint(128, (len(rows), size), generator=generator)
        parent = torch.randint(len(paths[0]), (len(rows), size), generator=generator)
        placement = cells.place(Frontier(tokens, parent, depth))
        logits, _, _ = target.forward(tokens.flatten(), placement, cache, Features())
        logits = logits.view(len(rows), size, -1)
        paths = [
            [above[p] + [t] for p, t in zip(ps, ts, strict=True)]
            for above, ps, ts in zip(paths, parent.tolist(), tokens.tolist(), strict=True)
        ]
        for place, row in enumerate(rows):
            expected = after(target, [prompts[row] + path for path in paths[place]])
            for found, wanted in zip(logits[place], expected, strict=True):
                torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    assert cache.lengths.tolist() == [9, 4, 12]


def test_one_row_needs_no_mask_for_a_chain() -> None:
    cache = filled(target_of("llama"), prompts_of(5))
    cells = FrontierCells(cache, [0])
    assert cells.cells is None
    straight = torch.zeros(1, 1, dtype=torch.int64)
    for depth in (1, 2, 3):
        placement = cells.place(Frontier(straight, straight, depth))
        assert placement.hidden is None
        assert placement.cells == slice(4 + depth, 5 + depth)
        assert placement.positions.tolist() == [4 + depth]
        assert placement.counts == [1]


def test_a_full_cache_says_so() -> None:
    cache = filled(target_of("llama"), prompts_of(39))
    cells = FrontierCells(cache, [0])
    pair = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(UserError, match=r"needs 41 tokens .* cache holds 40"):
        cells.place(Frontier(pair, pair, 1))

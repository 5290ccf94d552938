"""Best first: the N most probable prefixes, as brute force finds them, over any drafter's laws."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from drafters.base import Drafter
from drafters.growth import BestFirst, Dynamic
from drafters.growth.dynamic import best_children
from drafters.parallel import ParallelGuesser
from drafters.registry import build_drafter
from drafters.sampling import Warp
from drafters.tree import TokenTree
from inference import generate
from tests.tiny import prompts_of, tiny_target
from tests.unit.test_growth import Markov, coins, grow, table


def marginals(*rows: Sequence[float]) -> ParallelGuesser:
    """Return a parallel drafter's guesser of one row."""
    return ParallelGuesser(torch.tensor(rows).log()[:, None], None)


def paths_of(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Return the paths below the root and their probabilities."""
    tree.check()
    assert tree.confidence is not None
    sure = tree.confidence.exp().tolist()
    return {
        tuple(tree.token_list[n] for n in tree.path(node)[1:]): sure[node]
        for node in range(1, len(tree))
    }


def parallel_tree(guesser: ParallelGuesser, growth: BestFirst) -> TokenTree:
    (tree,) = growth.grow([0], guesser, Warp(), coins(1))
    return tree


def test_the_papers_vector() -> None:
    """7.6: six nodes whose probabilities sum to 1.908."""
    guesser = marginals([0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.5, 0.4, 0.1])
    found = paths_of(parallel_tree(guesser, BestFirst(6, 3)))
    expected = {
        (0,): 0.6,
        (0, 0): 0.42,
        (1,): 0.3,
        (0, 0, 0): 0.21,
        (1, 0): 0.21,
        (0, 0, 1): 0.168,
    }
    assert found == pytest.approx(expected)
    assert sum(found.values()) == pytest.approx(1.908)


@pytest.mark.parametrize("nodes", [1, 3, 8, 30])
@pytest.mark.parametrize("seed", range(3))
def test_marginals_give_the_best_of_all_prefixes(nodes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 2, 4, generator=generator)
    guesser = ParallelGuesser(logits, None)
    trees = BestFirst(nodes, 3).grow([0, 1], guesser, Warp(), coins(2))
    for row, tree in enumerate(trees):
        laws = logits[:, row].softmax(-1).tolist()
        every = {
            path: math.prod(law[token] for law, token in zip(laws, path, strict=False))
            for length in (1, 2, 3)
            for path in itertools.product(range(4), repeat=length)
        }
        best = sorted(every, key=lambda path: -every[path])[:nodes]
        assert paths_of(tree) == pytest.approx({path: every[path] for path in best}, rel=1e-4)


@pytest.mark.parametrize("nodes", [1, 4, 11, 40])
@pytest.mark.parametrize("seed", range(3))
def test_conditionals_give_the_best_of_all_prefixes(nodes: int, seed: int) -> None:
    """Each row's laws depend on the token before; rows of other trees stand beside it."""
    logits = table(4, seed)
    trees = grow(BestFirst(nodes, 3), Markov([0, 2, 3], [logits]))
    laws = logits.softmax(-1).tolist()
    for root, tree in zip((0, 2, 3), trees, strict=True):
        every: dict[tuple[int, ...], float] = {}
        for length in (1, 2, 3):
            for path in itertools.product(range(4), repeat=length):
                steps = itertools.pairwise((root, *path))
                every[path] = math.prod(laws[before][token] for before, token in steps)
        best = sorted(every, key=lambda path: -every[path])[:nodes]
        assert paths_of(tree) == pytest.approx({path: every[path] for path in best}, rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_ties_keep_parents(seed: int) -> None:
    for nodes in (2, 5, 9):
        (tree,) = grow(BestFirst(nodes, 4), Markov([0], [table(3, seed, levels=2)]))
        assert tree.drafted == nodes
    certain = torch.full((3, 3), -torch.inf).fill_diagonal_(0.0)
    (tree,) = grow(BestFirst(3, 4), Markov([0], [certain]))
    assert tree.token_list == [0, 0, 0, 0]


def test_nothing_is_asked_below_nodes_that_cannot_win() -> None:
    """Two likely tokens fill the budget, so no node is worth a look below it."""
    flat = torch.tensor([0.4, 0.4, 0.1, 0.1]).log().repeat(4, 1)
    guesser = Markov([0], [flat])
    (tree,) = grow(BestFirst(2, 4), guesser)
    assert sorted(tree.token_list[1:]) == [0, 1]
    assert guesser.frontiers == []
    steep = torch.tensor([0.9, 0.05, 0.04, 0.01]).log().repeat(4, 1)
    guesser = Markov([0], [steep])
    (tree,) = grow(BestFirst(3, 4), guesser)
    assert tree.token_list == [0, 0, 0, 0]
    assert [frontier.tokens.tolist() for frontier in guesser.frontiers] == [[[0, 1]], [[0]]]
    guesser = Markov([0, 1], [steep])  # as many of each row, not of all
    grow(BestFirst(3, 4), guesser)
    assert [frontier.tokens.tolist() for frontier in guesser.frontiers] == [[[0, 1]] * 2, [[0]] * 2]


def test_it_is_the_widest_dynamic_tree() -> None:
    guesser = Markov([0, 1], [table(6)])
    best = grow(BestFirst(7, 3), guesser)
    wide = grow(Dynamic(7, 7, 3), guesser)
    assert [tree.token_list for tree in best] == [tree.token_list for tree in wide]


def test_a_law_seen_by_many_nodes_is_sorted_once() -> None:
    law = torch.randn(2, 1, 9)
    value, choice = best_children(law.expand(-1, 5, -1), 3)
    again = best_children(law.repeat(1, 5, 1), 3)
    assert torch.equal(value, again[0])
    assert torch.equal(choice, again[1])
    assert value.stride(1) == 0


@pytest.mark.parametrize("name", ["medusa", "dspark", "eagle"])
def test_any_drafter_grows_best_first(name: str) -> None:
    target = tiny_target(num_hidden_layers=3, hidden_size=32, intermediate_size=64)
    taps: dict[str, object] = {} if name == "medusa" else {"taps": [0, 1, 2]}
    torch.manual_seed(1)
    drafter: Drafter = build_drafter(name, {"draft_vocab_size": 64, **taps}, target.shape)
    drafter.init_from(target)
    prompts = prompts_of(7, 12)
    plain, found = (
        [out.ids for out in generate(target, made, prompts, max_new_tokens=12, **shape)]
        for made, shape in (
            (build_drafter("none", {}, target.shape), {}),
            (drafter, {"growth": BestFirst(6, 3)}),
        )
    )
    assert found == plain

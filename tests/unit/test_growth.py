"""Growth policies: shapes, numbering, laws, closure under parents, refusals."""

import itertools
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from drafters.errors import UserError
from drafters.frontier import Frontier
from drafters.growth import (
    BestFirst,
    Chain,
    CostAware,
    Dynamic,
    Growth,
    Prices,
    ShapeValue,
    Static,
    build_growth,
)
from drafters.growth.base import drawable
from drafters.growth.label import shape_label
from drafters.growth.recent import BIN_MIDDLES, bin_of
from drafters.sampling import Coin, Warp
from drafters.tree import TokenTree


class Markov:
    """A guesser whose law depends on the last token (and the depth, if several tables are given).

    Args:
        roots: one a row.
        tables: [V, K] logits after each token, one a depth; the last serves all deeper ones.
        ids: reduced vocabulary.
    """

    def __init__(
        self, roots: Sequence[int], tables: Sequence[Tensor], ids: Tensor | None = None
    ) -> None:
        self.roots, self.tables, self.ids = torch.tensor(roots), tables, ids
        self.frontiers: list[Frontier] = []

    def root_logits(self) -> Tensor:
        return self.tables[0][self.roots]

    def step(self, frontier: Frontier) -> Tensor:
        assert frontier.parent.shape == frontier.tokens.shape
        assert frontier.parent.dtype == frontier.tokens.dtype == torch.int64
        self.frontiers.append(frontier)
        return self.tables[min(frontier.depth, len(self.tables) - 1)][frontier.tokens]


def table(size: int, seed: int = 0, *, levels: int = 0) -> Tensor:
    """Random logits [V, V]; with levels > 0 only so many different values, so ties abound."""
    generator = torch.Generator().manual_seed(seed)
    if levels:
        return torch.randint(levels, (size, size), generator=generator).float()
    return 2 * torch.randn(size, size, generator=generator)


def coins(count: int) -> list[Coin]:
    return [Coin(seed) for seed in range(count)]


def grow(growth: Growth, guesser: Markov, warp: Warp | None = None) -> list[TokenTree]:
    roots = guesser.roots.tolist()
    trees = growth.grow(roots, guesser, warp or Warp(), coins(len(roots)))
    for tree, root in zip(trees, roots, strict=True):
        tree.check()
        assert tree.root == root
        assert tree.drafted <= growth.nodes
        assert int(tree.depth.max()) <= growth.depth
    return trees


GREEDY = [Chain(3), Static((3, 2, 1)), Dynamic(6, 3, 3), Dynamic(20, 2, 4), Dynamic(3, 4, 1)]


@pytest.mark.parametrize("growth", GREEDY, ids=str)
def test_rows_are_grown_as_if_alone(growth: Growth) -> None:
    together = grow(growth, Markov([0, 3, 5], [table(7)]))
    for tree, root in zip(together, [0, 3, 5], strict=True):
        alone = grow(growth, Markov([root], [table(7)]))[0]
        assert tree.token_list == alone.token_list
        assert tree.parent_list == alone.parent_list


@pytest.mark.parametrize("growth", GREEDY, ids=str)
def test_a_sessions_cache_holds_every_expanded_node(growth: Growth) -> None:
    guesser = Markov([1], [table(7)])
    grow(growth, guesser)
    assert sum(f.tokens.shape[1] for f in guesser.frontiers) <= growth.cells
    depths = [f.depth for f in guesser.frontiers]  # fewer where deeper nodes cannot be kept
    assert depths == list(range(1, growth.depth))[: len(depths)]


def test_frontiers_name_their_parents() -> None:
    """Following parents back through the frontiers gives paths of the tree."""
    for growth in (Static((2, 2, 2)), Dynamic(9, 3, 4)):
        guesser = Markov([2], [table(7)])
        grow(growth, guesser)
        above: list[list[int]] = [[2]]
        for frontier in guesser.frontiers:
            below = []
            tokens, parents = frontier.tokens[0].tolist(), frontier.parent[0].tolist()
            for token, parent in zip(tokens, parents, strict=True):
                best = table(7)[above[parent][-1]].topk(3).indices.tolist()
                assert token in best
                below.append([*above[parent], token])
            above = below


def test_chain_follows_the_most_likely_token() -> None:
    logits = table(6)
    tree = grow(Chain(4), Markov([2], [logits]))[0]
    expected = [2]
    for _ in range(4):
        expected.append(int(logits[expected[-1]].argmax()))
    assert tree.token_list == expected
    assert tree.is_chain
    assert tree.laws is None


def test_chain_draws_from_the_warped_law_it_carries() -> None:
    logits, warp = table(6), Warp(0.7, top_k=3)
    trees = grow(Chain(3, "sampled"), Markov([2, 4], [logits]), warp)
    for tree in trees:
        assert tree.laws is not None
        for node in (1, 2, 3):
            law = tree.laws.drawn_from(node)
            assert law is not None
            above = tree.token_list[node - 1]
            torch.testing.assert_close(law.weights, warp.laws(logits[above][None]).probs[0])
            assert law.weight(tree.token_list[node]) > 0


@pytest.mark.parametrize("growth", [Chain(2, "sampled"), Static((2, 1), "sampled")])
def test_sampled_drafting_at_temperature_0_is_argmax(growth: Growth) -> None:
    (tree,) = grow(growth, Markov([1], [table(6)]), Warp(0.0))
    plain = Chain(2) if isinstance(growth, Chain) else Static((2, 1))
    (expected,) = grow(plain, Markov([1], [table(6)]))
    assert (tree.token_list, tree.laws) == (expected.token_list, None)


@pytest.mark.parametrize(
    "growth",
    [
        *(Chain(3), Chain(3, "sampled"), Static((2, 2)), Static((2, 2), "sampled")),
        *(Dynamic(8, 3, 3), BestFirst(8, 3)),
    ],
    ids=str,
)
def test_reduced_vocabularies_come_back_as_target_ids(growth: Growth) -> None:
    ids = torch.tensor([4, 7, 9])
    logits = table(10)[:, :3]
    (tree,) = grow(growth, Markov([5], [logits], ids), Warp(1.0))
    assert set(tree.token_list[1:]) <= {4, 7, 9}
    if growth.draft == "sampled":
        assert tree.laws is not None
        assert tree.laws.ids is ids
    else:
        assert tree.token_list[1] == int(ids[logits[5].argmax()])


def test_static_numbers_nodes_level_by_level() -> None:
    growth = Static((2, 3))
    assert growth.parents().tolist() == [-1, 0, 0, 1, 1, 1, 2, 2, 2]
    assert (growth.nodes, growth.depth) == (8, 2)
    logits = table(6)
    tree = grow(growth, Markov([0], [logits]))[0]
    first = logits[0].topk(2).indices.tolist()
    below = [token for node in first for token in logits[node].topk(3).indices.tolist()]
    assert tree.token_list == [0, *first, *below]
    assert tree.parent_list == growth.parents().tolist()


def test_static_draws_siblings_without_replacement() -> None:
    """The law of each sibling is the parent's, without the elder ones, renormalised."""
    logits, warp = table(5), Warp(1.0)
    trees = grow(Static((3, 2), "sampled"), Markov([0, 1, 4], [logits]), warp)
    for tree in trees:
        assert tree.laws is not None
        for parent, siblings in enumerate(tree.children):
            law = warp.laws(logits[tree.token_list[parent]][None]).probs[0]
            for child in siblings:
                own = tree.laws.drawn_from(child)
                assert own is not None
                torch.testing.assert_close(own.weights, law / law.sum())
                assert own.weight(tree.token_list[child]) > 0
                law = law.index_fill(0, torch.tensor(tree.token_list[child]), 0.0)


def test_static_drops_siblings_that_no_mass_is_left_for() -> None:
    """Three children of a law on two tokens: the third does not exist, nor what hangs below it."""
    logits = table(5)
    trees = grow(Static((3, 1), "sampled"), Markov([0, 1], [logits]), Warp(1.0, top_k=2))
    for tree in trees:
        assert tree.parent_list == [-1, 0, 0, 1, 2]
        assert tree.laws is not None
        kept = set(logits[tree.root].topk(2).indices.tolist())
        assert set(tree.token_list[1:3]) == kept
        second = tree.laws.drawn_from(2)
        assert second is not None
        assert second.weight(tree.token_list[2]) == 1


def test_static_pairs_are_drawn_with_the_right_frequencies() -> None:
    """P(first a, then b) = q(a) q(b) / (1 - q(a)), over 1500 rows."""
    law = [Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)]
    count = 1500
    logits = torch.tensor([[float(x) for x in law]]).log()
    trees = grow(Static((2,), "sampled"), Markov([0] * count, [logits]), Warp(1.0))
    seen = [tuple(tree.token_list[1:]) for tree in trees]
    statistic = 0.0
    for a, b in itertools.permutations(range(3), 2):
        expected = float(law[a] * law[b] / (1 - law[a])) * count
        statistic += (seen.count((a, b)) - expected) ** 2 / expected
    assert statistic < 25.7  # chi-square with 5 degrees of freedom: p = 1e-4


def best_nodes(growth: Dynamic, root: int, logits: Tensor) -> list[tuple[int, ...]]:
    """Grow by the book: beams of `width`, then the best of all that was scored."""
    law = logits.log_softmax(-1)
    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, (root,))]
    scored: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(growth.depth):
        children = [
            (value + float(law[path[-1], token]), (*path, token))
            for value, path in beam
            for token in law[path[-1]].topk(growth.width).indices.tolist()
        ]
        scored += children
        beam = sorted(children, reverse=True)[: growth.width]
    return sorted(path for _, path in sorted(scored, reverse=True)[: growth.nodes])


@pytest.mark.parametrize("growth", [Dynamic(6, 3, 3), Dynamic(2, 2, 4), Dynamic(12, 4, 3)], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_dynamic_keeps_the_best_paths(growth: Dynamic, seed: int) -> None:
    logits = table(8, seed)
    (tree,) = grow(growth, Markov([3], [logits]))
    paths = [tuple(tree.token_list[n] for n in tree.path(node)) for node in range(1, len(tree))]
    assert sorted(paths) == best_nodes(growth, 3, logits)


@given(
    st.integers(0, 10_000),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3]),
)
def test_dynamic_is_closed_under_parents_in_spite_of_ties(
    seed: int, nodes: int, width: int, depth: int, levels: int
) -> None:
    """`grow` checks that parents come first; ties are exact since few logits occur."""
    growth = Dynamic(nodes, width, depth)
    for tree in grow(growth, Markov([0, 1], [table(5, seed, levels=levels)])):
        available = sum(width * min(width ** (d - 1), width) for d in range(1, depth + 1))
        assert tree.drafted == min(nodes, available)


def test_dynamic_keeps_parents_of_certain_nodes() -> None:
    """log q = 0 exactly: a child is worth what its parent is, and the parent stays."""
    certain = torch.full((5, 5), -200.0)
    certain[torch.arange(5), (torch.arange(5) + 1) % 5] = 200.0
    (tree,) = grow(Dynamic(3, 2, 4), Markov([0], [certain]))
    assert tree.token_list == [0, 1, 2, 3]
    assert tree.parent_list == [-1, 0, 1, 2]


def test_dynamic_on_a_vocabulary_narrower_than_its_width() -> None:
    (tree,) = grow(Dynamic(6, 8, 2), Markov([0], [table(3)]))
    assert tree.drafted == 6
    assert len(tree.children[0]) <= 3


def test_static_on_a_vocabulary_narrower_than_its_branching() -> None:
    with pytest.raises(UserError) as raised:
        grow(Static((2, 4)), Markov([0], [table(3)]))
    assert str(raised.value) == (
        "branching is 4 at depth 2 and the draft vocabulary has 3 ids: give that or less"
    )
    assert grow(Static((2, 3)), Markov([0], [table(3)]))[0].drafted == 8


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain", {"gamma": 0}, "gamma is 0: give a whole number from 1 to 1024"),
        ("chain", {"gamma": 1025}, "gamma is 1025: give a whole number from 1 to 1024"),
        (
            "static",
            {"branching": (100, 100, 100)},
            "the number of the tree's nodes is 1010100: give a whole number from 1 to 1024",
        ),
        ("chain", {"gamma": -1}, "gamma is -1: give a whole number from 1 to 1024"),
        ("chain", {"gamma": "3"}, "gamma is '3': give a whole number from 1 to 1024"),
        ("chain", {"gamma": 2.0}, "gamma is 2.0: give a whole number from 1 to 1024"),
        (
            "chain",
            {"draft": "greedy"},
            "draft is 'greedy' with growth chain: give argmax or sampled",
        ),
        (
            "static",
            {"branching": ()},
            "branching is empty: give children per depth, such as 3.2.1",
        ),
        ("static", {"branching": (2, 0)}, "branching is 0: give a whole number from 1 to 1024"),
        (
            "static",
            {"branching": (2,), "tree": ((0,),)},
            "branching and tree both name a shape: give one of them",
        ),
        (
            "static",
            {"draft": "iid"},
            "draft is 'iid' with growth static: give argmax or sampled",
        ),
        ("dynamic", {"draft": "sampled"}, "draft is 'sampled' with growth dynamic: give argmax"),
        ("dynamic", {"nodes": 0}, "nodes is 0: give a whole number from 1 to 1024"),
        ("dynamic", {"width": 0}, "width is 0: give a whole number from 1 to 1024"),
        ("dynamic", {"depth": 0}, "depth is 0: give a whole number from 1 to 1024"),
        ("best_first", {"nodes": 0}, "nodes is 0: give a whole number from 1 to 1024"),
        ("best_first", {"depth": 0}, "depth is 0: give a whole number from 1 to 1024"),
        (
            "best_first",
            {"width": 3},
            "growth best_first has no option 'width': give depth, draft, nodes",
        ),
        (
            "best_first",
            {"draft": "sampled"},
            "draft is 'sampled' with growth best_first: give argmax",
        ),
        ("cost_aware", {"nodes": 0}, "nodes is 0: give a whole number from 1 to 1024"),
        ("cost_aware", {"width": 0}, "width is 0: give a whole number from 1 to 1024"),
        ("cost_aware", {"depth": 0}, "depth is 0: give a whole number from 1 to 1024"),
        (
            "cost_aware",
            {"draft": "both"},
            "draft is 'both' with growth cost_aware: give argmax or sampled",
        ),
        (
            "tree",
            {},
            "growth is 'tree': give chain, static, dynamic, best_first, cost_aware",
        ),
        ("chain", {"nodes": 3}, "growth chain has no option 'nodes': give draft, gamma"),
    ],
)
def test_what_cannot_be_grown_is_refused(
    name: str, options: dict[str, ShapeValue], message: str
) -> None:
    with pytest.raises(UserError) as raised:
        build_growth(name, options)
    assert str(raised.value) == message


def test_growths_are_built_by_name() -> None:
    assert build_growth("chain", {"gamma": 2, "draft": "sampled"}) == Chain(2, "sampled")
    assert build_growth("static", {"branching": (2, 1)}) == Static((2, 1))
    assert build_growth("dynamic", {"nodes": 5}) == Dynamic(5, 4, 4)
    assert build_growth("best_first", {"depth": 2}) == BestFirst(16, 2)
    assert build_growth("cost_aware", {"width": 2}) == CostAware(8, 2, 6)


@pytest.mark.parametrize(
    ("growth", "sizes"),
    [
        (Chain(3), (3, 3, 1, 3, 3)),
        (Static((3, 2)), (2, 9, 3, 2, 9)),
        (Static((1,)), (1, 1, 1, 1, 1)),
        (Dynamic(8, 3, 4), (4, 8, 3, 4, 9)),
        (BestFirst(8, 3), (3, 8, 8, 3, 16)),
        (CostAware(8, 3, 4), (4, 8, 3, 4, 9)),
        (CostAware(8, 3, 4, "sampled"), (4, 8, 1, 4, 3)),
    ],
    ids=str,
)
def test_what_a_shape_may_take(growth: Growth, sizes: tuple[int, ...]) -> None:
    """Levels, drafted nodes, nodes expanded at once, levels of a round, cells of a drafter."""
    found = (growth.depth, growth.nodes, growth.expanded, growth.levels, growth.cells)
    assert found == sizes


def test_fixed_shapes_learn_nothing() -> None:
    growth = Chain(3)
    assert growth.start(4) is growth
    assert growth.member(1, 4) is growth
    assert growth.budget([0.5, 0.0]) == 2
    growth.observe([None])


def test_drafts_of_states_that_overflowed_are_drawn_uniformly() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [torch.nan, 0.0, 0.0]])
    laws = drawable(Warp(1.0), logits, torch.tensor([4, 5, 7]))
    torch.testing.assert_close(laws.probs[0], logits[0].softmax(-1))
    assert laws.probs[1].tolist() == [pytest.approx(1 / 3)] * 3
    assert laws.ids.tolist() == [4, 5, 7]
    assert drawable(Warp(1.0), logits).ids is None
    both = drawable(Warp(1.0), torch.stack((logits, logits.flip(0))))  # more axes
    assert torch.equal(both.probs, torch.stack((laws.probs, laws.probs.flip(0))))


@pytest.mark.parametrize(
    ("growth", "shape", "nodes", "label"),
    [
        ("dynamic", {"nodes": 8, "width": 3, "depth": 4}, None, "dynamic 8/3/4"),
        ("chain", {"gamma": 3, "draft": "sampled"}, 9, "chain 3"),
        ("static", {"branching": (3, 1), "draft": "argmax", "tree": ()}, None, "static 3.1"),
        ("static", {"branching": [2]}, None, "static 2"),
        ("static", {"branching": (3, 1), "tree": [[0], [0, 0]]}, None, "static tree of 2"),
        ("static", {"tree": [[0], [0, 0]]}, 7, "static tree of 7"),
        ("static", {"tree": "file.json"}, None, "static tree of 1"),
        ("none", {}, None, "none"),
    ],
)
def test_a_shape_in_a_few_characters(
    growth: str, shape: dict[str, object], nodes: int | None, label: str
) -> None:
    assert shape_label(growth, shape, nodes) == label


def test_prices_lie_on_straight_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat before the first size, as steep as before behind the last, the same far out."""
    prices = Prices(((1, 1.0), (5, 1.0), (9, 2.0)))
    assert [prices.tokens(n) for n in (0, 0.5, 1, 3, 5, 6, 6.5, 9, 11, 9 + 64, 109)] == [
        *(1.0, 1.0, 1.0, 1.0, 1.0, 1.25, 1.375, 2.0, 2.5, 18.0, 27.0)
    ]
    one = Prices(((1, 1.0),))
    assert [one.tokens(n) for n in (1, 1.5, 64.5, 65, 300)] == [1.0] * 5
    assert one.verify == ((1, 1.0),)
    assert Prices(((1, 1.0), (2, 0.5), (4, 2.0))).verify == ((1, 1.0), (2, 1.0), (4, 2.0))
    drafting = Prices(((1, 1.0),), first=0.5, level=0.25)
    assert [drafting.drafting(n) for n in (0, 1, 2, 3)] == [0.0, 0.5, 0.75, 1.0]
    assert (one.first, one.level) == (0.0, 0.0)
    monkeypatch.delattr("drafters.growth.prices.line")
    assert prices.tokens(9 + 62) == 17.5  # asked for every node: looked up, not worked out


@pytest.mark.parametrize("sizes", [[], [2], [1, 3, 3], [1, 4, 2]])
def test_prices_of_sizes_that_do_not_ascend_from_1_are_refused(sizes: list[int]) -> None:
    with pytest.raises(UserError) as raised:
        Prices(tuple((n, 1.0) for n in sizes))
    assert str(raised.value) == f"prices for {sizes} tokens: give sizes ascending from 1"


def test_confidences_fall_into_bins() -> None:
    assert [bin_of(x) for x in (0.0, 0.019, 0.02, 0.3, 0.5, 0.949, 0.95, 1.0)] == [
        *(0, 0, 1, 4, 6, 8, 9, 9)
    ]
    assert [bin_of(x) for x in BIN_MIDDLES] == list(range(10))


class Elsewhere(TorchFunctionMode):
    """A device without data: every real number read of it is `value`; nothing is mixed with it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        read = getattr(func, "__name__", "") in ("cpu", "tolist", "__int__", "__bool__")
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.ndim]
        assert func is Tensor.__getitem__ or len({x.device for x in tensors}) <= 1, func
        if read and args[0].is_meta:
            value = self.value if args[0].is_floating_point() else 0
            args = (torch.full_like(args[0], value, device="cpu"), *args[1:])
        return func(*args, **(kwargs or {}))


class Remote:
    """A guesser on another device, which checks that what it is asked lies there too."""

    def __init__(self, ids: Tensor | None) -> None:
        self.ids = ids

    def root_logits(self) -> Tensor:
        return torch.zeros(2, 6, device="meta")

    def step(self, frontier: Frontier) -> Tensor:
        assert frontier.tokens.is_meta
        assert frontier.parent.is_meta
        assert frontier.tokens.shape == frontier.parent.shape
        return torch.zeros(*frontier.tokens.shape, 6, device="meta")


@pytest.mark.parametrize(
    "growth",
    [
        *(Chain(2), Static((3, 2)), Dynamic(6, 3, 3), BestFirst(9, 3)),
        *(Chain(2, "sampled"), Static((3, 2), "sampled")),
        *(CostAware(6, 2, 3, d).priced(Prices(((1, 1.0),))) for d in ("argmax", "sampled")),
    ],
    ids=repr,
)
@pytest.mark.parametrize("reduced", [False, True])
def test_trees_are_grown_where_the_drafter_is_and_handed_over(
    growth: Growth, reduced: bool
) -> None:
    ids = torch.arange(6, device="meta") if reduced else None
    with Elsewhere(float(growth.draft == "sampled")):  # scores of 0 and chances of 1 pay
        trees = growth.grow([3, 4], Remote(ids), Warp(1.0), coins(2))
    for tree in trees:
        assert not tree.tokens.is_meta
        assert not tree.parent.is_meta
        assert tree.laws is None or tree.laws.probs.is_meta

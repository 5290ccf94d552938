"""Token trees."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.laws import Laws
from drafters.tree import TokenTree

parents = st.integers(1, 8).flatmap(
    lambda n: st.tuples(*[st.integers(0, i) for i in range(n)]).map(lambda p: [-1, *p])
)


@given(parents)
def test_depth_visibility_and_paths_agree(parent: list[int]) -> None:
    tree = TokenTree(torch.arange(len(parent)), torch.tensor(parent))
    tree.check()
    for node in range(len(tree)):
        path = tree.path(node)
        assert len(path) == int(tree.depth[node]) + 1
        assert tree.visible[node].nonzero().flatten().tolist() == path


@given(parents, st.integers(0, 4))
def test_limit_keeps_what_is_shallow(parent: list[int], depth: int) -> None:
    tree = TokenTree(torch.arange(len(parent)), torch.tensor(parent))
    cut = tree.limit(depth)
    cut.check()
    want = {tuple(tree.path(n)) for n in range(len(tree)) if int(tree.depth[n]) <= depth}
    got = {tuple(cut.token_list[n] for n in cut.path(m)) for m in range(len(cut))}
    assert got == want  # tokens are the original node numbers here


def test_limit_keeps_the_laws_of_its_nodes() -> None:
    laws = Laws(torch.eye(3), None, torch.tensor([0, 2, 1]))
    tree = TokenTree(torch.tensor([0, 0, 1, 2]), torch.tensor([-1, 0, 1, 0]), laws).limit(1)
    assert tree.token_list == [0, 0, 2]
    assert tree.laws is not None
    assert tree.laws.of_list == [0, 1]


@given(st.lists(st.lists(st.integers(0, 2), max_size=3), max_size=5), st.randoms())
def test_from_paths_does_not_depend_on_the_order(paths: list[list[int]], random) -> None:
    shuffled = random.sample(paths, len(paths))
    trees = [TokenTree.from_paths(9, p) for p in (paths, shuffled)]
    routes = [{tuple(t.token_list[n] for n in t.path(m)) for m in range(len(t))} for t in trees]
    assert routes[0] == routes[1]
    trees[0].check()


def test_broken_trees_are_named() -> None:
    with pytest.raises(ValueError, match="node 1 has parent 1"):
        TokenTree(torch.tensor([1, 2]), torch.tensor([-1, 1])).check()
    with pytest.raises(ValueError, match="node 0 must be the root"):
        TokenTree(torch.tensor([1]), torch.tensor([0])).check()
    with pytest.raises(ValueError, match="two children with one token"):
        TokenTree(torch.tensor([1, 2, 2]), torch.tensor([-1, 0, 0])).check()
    # drawn siblings may repeat: each is tried again
    laws = Laws(torch.ones(1, 3) / 3, None, torch.tensor([0, 0]))
    TokenTree(torch.tensor([1, 2, 2]), torch.tensor([-1, 0, 0]), laws).check()


def test_a_tree_by_hand() -> None:
    tree = TokenTree.from_paths(4, [[1, 2], [3], [1, 5]])
    assert tree.token_list == [4, 1, 2, 3, 5]
    assert tree.parent_list == [-1, 0, 1, 0, 1]
    assert tree.children == [[1, 3], [2, 4], [], [], []]
    assert tree.depth.tolist() == [0, 1, 2, 1, 2]
    assert (tree.root, len(tree), tree.drafted, tree.is_chain) == (4, 5, 4, False)
    assert (tree.child(0, 3), tree.child(1, 5), tree.child(0, 5), tree.child(2, 1)) == (
        *(3, 4),
        *(None, None),
    )
    assert tree.visible.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert tree.tokens.dtype == tree.parent.dtype == tree.depth.dtype == torch.int64
    assert tree.visible.dtype == torch.bool


def test_a_chain_by_hand() -> None:
    laws = Laws(torch.eye(3), None, torch.tensor([0, 1]))
    tree = TokenTree.chain([2, 0, 1], laws)
    assert tree.laws is laws
    assert tree.tokens.dtype == torch.int64
    assert TokenTree.chain(torch.tensor([2.0, 0.0])).tokens.dtype == torch.int64
    assert (tree.parent_list, tree.is_chain) == ([-1, 0, 1], True)
    assert tree.depth.tolist() == [0, 1, 2]
    assert tree.visible.tolist() == [[True, False, False], [True, True, False], [True] * 3]
    assert tree.visible.dtype == torch.bool
    built = TokenTree(tree.tokens, torch.tensor([-1, 0, 1]))
    assert built.is_chain
    assert built.depth.tolist() == [0, 1, 2]


def test_the_eldest_of_equal_children_is_found() -> None:
    laws = Laws(torch.ones(1, 3) / 3, None, torch.tensor([0, 0]))
    tree = TokenTree(torch.tensor([1, 2, 2]), torch.tensor([-1, 0, 0]), laws)
    assert tree.child(0, 2) == 1


def test_keep_takes_parents_laws_and_confidence_along() -> None:
    laws = Laws(torch.eye(4), None, torch.tensor([3, -1, 2, 0]))
    sure = torch.tensor([0.0, -1.0, -2.0, -3.0, -4.0])
    tree = TokenTree(torch.arange(5), torch.tensor([-1, 0, 0, 1, 2]), laws, sure)
    cut = tree.keep([0, 2, 4])
    assert (cut.token_list, cut.parent_list) == ([0, 2, 4], [-1, 0, 1])
    assert cut.laws is not None
    assert cut.laws.of_list == [-1, 0]
    assert cut.laws.probs is laws.probs
    assert cut.laws.ids is None
    assert cut.confidence is not None
    assert cut.confidence.tolist() == [0.0, -2.0, -4.0]
    assert tree.keep(range(5)) is tree
    assert tree.limit(2) is tree
    assert tree.limit(1).token_list == [0, 1, 2]
    bare = TokenTree(torch.arange(3), torch.tensor([-1, 0, 0])).keep([0, 2])
    assert (bare.laws, bare.confidence) == (None, None)
    ids = torch.tensor([7, 8, 9, 3])
    shared = TokenTree(torch.arange(5), tree.parent, Laws(torch.eye(4), ids, laws.of)).keep([0, 1])
    assert shared.laws is not None
    assert shared.laws.ids is ids


def test_limit_looks_at_every_node() -> None:
    """The last node is the shallowest here, the deepest stands in the middle."""
    tree = TokenTree(torch.arange(4), torch.tensor([-1, 0, 1, 0]))
    assert tree.limit(1).token_list == [0, 1, 3]
    assert tree.limit(0).token_list == [0]


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([1, 2], [-1, 1], "node 1 has parent 1: parents come first"),
        ([1, 2], [-1, -1], "node 1 has parent -1: parents come first"),
        ([1, 2, 3], [-1, 0, 3], "node 2 has parent 3: parents come first"),
        ([1], [0], "node 0 must be the root with parent -1: parents [0]"),
        ([], [], "node 0 must be the root with parent -1: parents []"),
        ([1, 2], [-1], "node 0 must be the root with parent -1: parents [-1]"),
        ([1, 5, 2, 2], [-1, 0, 1, 1], "node 1 has two children with one token: [2, 2]"),
    ],
)
def test_what_a_broken_tree_is_told(tokens: list[int], parents: list[int], message: str) -> None:
    tree = TokenTree(
        torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents, dtype=torch.int64)
    )
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (its whole text follows)
        tree.check()
    assert str(raised.value) == message


def test_point_masses_beside_drawn_siblings_are_told_apart() -> None:
    """Only point masses may not repeat one another: a drawn sibling may hold their token."""
    parents, probs = torch.tensor([-1, 0, 0, 0]), torch.ones(1, 3) / 3
    of = torch.tensor([0, -1, 0])
    TokenTree(torch.tensor([1, 2, 2, 2]), parents, Laws(probs, None, of)).check()
    of = torch.tensor([-1, 0, -1])
    with pytest.raises(ValueError, match=r"one token: \[2, 2\]"):
        TokenTree(torch.tensor([1, 2, 0, 2]), parents, Laws(probs, None, of)).check()

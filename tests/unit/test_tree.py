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

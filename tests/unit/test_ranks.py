"""Searched static trees: best by brute force, grown as their paths say, measured by hand."""

import json
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters.base import Batch, Features, NeuralDrafter, Prediction
from drafters.errors import UserError
from drafters.growth import Static, build_growth
from drafters.growth.ranks import Level, Paths, expected, full, levels_of, read_paths, search
from drafters.methods.none import NoDrafter
from drafters.sampling import Warp
from inference import generate
from inference.ranks import rank_accuracies
from inference.spec import Spec
from tests.tiny import prompts_of, tiny_target
from tests.unit.test_growth import Markov, coins, table

NINE = [[Fraction(n, 20) for n in row] for row in ([10, 5, 2], [8, 4, 3], [9, 2, 1])]


def every_tree(depths: int, ranks: int, nodes: int) -> set[frozenset[tuple[int, ...]]]:
    """Return all trees of so many nodes, whatever their worth."""
    trees = {frozenset[tuple[int, ...]]()}
    paths = [path for d in range(1, depths + 1) for path in product(range(ranks), repeat=d)]
    for _ in range(nodes):
        trees = {
            tree | {path}
            for tree in trees
            for path in paths
            if path not in tree
            and (len(path) == 1 or path[:-1] in tree)
            and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree)
        }
    return trees


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 6])
def test_the_search_finds_what_brute_force_finds(nodes: int) -> None:
    """Exact fractions, three depths of three ranks: no tree is worth more."""
    found = search(NINE, nodes)
    best = max(expected(tuple(tree), NINE) for tree in every_tree(3, 3, nodes))
    assert len(set(found)) == nodes
    assert frozenset(found) in every_tree(3, 3, nodes)
    assert expected(found, NINE) == best


def test_a_tree_worked_by_hand() -> None:
    """Values: 0: 1/2, 1: 1/4, 00: 1/5, 000: 9/100, then 01, 10 and 2, each 1/10 before that."""
    assert search(NINE, 3) == ((0,), (1,), (0, 0))
    assert set(search(NINE, 6)[3:]) == {(0, 1), (1, 0), (2,)}
    assert search(NINE, 7)[6] == (0, 0, 0)
    assert expected(search(NINE, 7), NINE) == Fraction(1, 2) + Fraction(1, 4) + Fraction(
        1, 5
    ) + 3 * Fraction(1, 10) + Fraction(9, 100)


def test_a_budget_beyond_all_paths_takes_them_all() -> None:
    assert set(search([[0.5, 0.3], [0.4]], 99)) == {(0,), (1,), (0, 0), (1, 0)}


def test_ties_and_zeros_make_trees_too() -> None:
    for accuracies in ([[0.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]):
        levels_of(search(accuracies, 5))


@pytest.mark.parametrize("draft", ["argmax", "sampled"])
@pytest.mark.parametrize("branching", [(2, 1, 2), (3,), (1, 1, 1)])
def test_branching_is_one_of_the_trees(branching: tuple[int, ...], draft: str) -> None:
    one, other = Static(branching, draft), Static(draft=draft, tree=full(branching))
    for name in ("depth", "nodes", "expanded", "cells"):
        assert getattr(one, name) == getattr(other, name)
    grown = [
        growth.grow([0, 3], Markov([0, 3], [table(6)]), Warp(1.0), coins(2))
        for growth in (one, other)
    ]
    for first, second in zip(*grown, strict=True):
        assert first.token_list == second.token_list
        assert first.parent_list == second.parent_list


RAGGED: Paths = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (2, 0, 0))


def test_a_ragged_tree_is_a_part_of_the_full_one() -> None:
    ragged, whole = Static(tree=RAGGED), Static((3, 2, 1))
    assert (ragged.depth, ragged.nodes, ragged.expanded) == (3, 7, 2)
    assert ragged.parents().tolist() == [-1, 0, 0, 0, 1, 1, 3, 6]
    small, large = (
        growth.grow([1], Markov([1], [table(7)]), Warp(), coins(1))[0] for growth in (ragged, whole)
    )
    small.check()
    # the full tree's nodes: 1 2 3 | 4 5 of 1, 6 7 of 2, 8 9 of 3 | one below each
    assert small.token_list == [large.token_list[n] for n in (0, 1, 2, 3, 4, 5, 8, 14)]


def test_a_drawn_ragged_tree_keeps_each_node_s_law() -> None:
    """A younger sibling's law lacks the elder one, whatever the others' numbers of children."""
    logits = table(7)
    growth = Static(draft="sampled", tree=((0,), (1,), (1, 0), (1, 1)))
    tree = growth.grow([0], Markov([0], [logits]), Warp(1.0), coins(1))[0]
    assert tree.laws is not None
    law = logits[0].softmax(-1)
    torch.testing.assert_close(tree.laws.probs[0], law)
    law[tree.token_list[1]] = 0
    torch.testing.assert_close(tree.laws.probs[1], law / law.sum())
    below = logits[tree.token_list[2]].softmax(-1)
    torch.testing.assert_close(tree.laws.probs[2], below)
    assert tree.parent_list == [-1, 0, 0, 2, 2]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(1,)], "the tree has the path [1] without [0]"),
        ([(0,), (1, 0)], "the tree has the path [1, 0] without [1]"),
        ([(0,), (0, 1)], "the tree has the path [0, 1] without [0, 0]"),
        ([(0,), (1, 2)], "the tree has the path [1, 2] without [1]"),
        ([(0,), (0, 0, 0)], "the tree has the path [0, 0, 0] without [0, 0]"),
        ([(0,), (0,)], "the tree has a path twice"),
    ],
)
def test_what_is_no_tree_is_refused(paths: list[tuple[int, ...]], message: str) -> None:
    for tried in (levels_of, lambda paths: Static(tree=tuple(paths))):
        with pytest.raises(UserError) as raised:
            tried(paths)
        assert str(raised.value) == message


def test_a_tree_level_by_level() -> None:
    assert levels_of(reversed(RAGGED)) == [
        Level(above=(0, 0, 0), rank=(0, 1, 2), expanded=(0, 2)),
        Level(above=(0, 0, 1), rank=(0, 1, 0), expanded=(2,)),
        Level(above=(0,), rank=(0,), expanded=()),
    ]
    assert full([2, 1]) == ((0,), (1,), (0, 0), (1, 0))


@pytest.mark.parametrize(
    ("accuracies", "nodes"), [([], 1), ([[0.5]], 0), ([[0.5], []], 1), ([[]], 3)]
)
def test_nothing_to_search(accuracies: list[list[float]], nodes: int) -> None:
    with pytest.raises(UserError) as raised:
        search(accuracies, nodes)
    assert str(raised.value) == (
        f"a tree of {nodes} nodes over {len(accuracies)} depths: give 1 or more of "
        "both, and an accuracy of one rank a depth"
    )
    assert search([[0.5]], 1) == ((0,),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "holds no paths of ranks"),
        ("[[0], []]", "holds no paths of ranks"),
        ("[[0], [true]]", "holds no paths of ranks"),
        ("[[0], [-1]]", "holds no paths of ranks"),
        ("[[0], [1.0]]", "holds no paths of ranks"),
        ('{"path": []}', "cannot be read ('paths')"),
        ("[0]", "cannot be read ('int' object is not iterable)"),
        ("3", "cannot be read ('int' object is not iterable)"),
    ],
)
def test_what_a_file_without_a_tree_is_told(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "tree.json"
    file.write_text(text)
    with pytest.raises(UserError) as raised:
        read_paths(file)
    assert str(raised.value) == (
        f"tree {file} {said}: give a JSON list of paths of ranks such as [[0], [1], [0, 0]], "
        "alone or under 'paths'"
    )


def test_files_hold_trees(tmp_path: Path) -> None:
    """Bare lists, as the Medusa repository lists its choices, or what the search writes."""
    for number, held in enumerate(([[0], [1], [0, 0]], {"paths": [[0], [1], [0, 0]]})):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(held))
        spec = Spec.parse(f"D:growth=static,tree={file}")
        assert spec.growth == Static(tree=((0,), (1,), (0, 0)))
        assert spec.growth == build_growth("static", {"tree": read_paths(file)})
    for text in ("[", "{}", "[]", "[[]]", '[["a"]]', "[[-1]]", "[0]", '{"paths": 3}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UserError, match=r"tree .*bad\.json .*give a JSON list of paths"):
            Spec.parse(f"D:growth=static,tree={tmp_path / 'bad.json'}")
    with pytest.raises(UserError, match="branching and tree both name a shape"):
        Spec.parse(f"D:growth=static,branching=2,tree={tmp_path / '0.json'}")
    with pytest.raises(UserError, match="growth chain has no option 'tree'"):
        Spec.parse(f"D:tree={tmp_path / '0.json'}")


class Planned(NeuralDrafter):
    """Predicts so that the true token has a rank known in advance: its position modulo 3."""

    name = "planned"
    features = Features()

    def __init__(self, ids: Tensor | None) -> None:
        super().__init__()
        self.kept = ids

    @property
    def ids(self) -> Tensor | None:
        return self.kept

    def predict(self, batch: Batch, target: object) -> list[Prediction]:
        found = []
        for depth in (1, 2):
            places = batch.label_mask[0].nonzero()[depth:, 0] - 1
            logits = torch.zeros(len(places), 128)
            for row, place in enumerate(places.tolist()):
                rank = (place + depth) % 3
                label = int(batch.ids[0, place + 1])
                logits[row, label] = 1.0
                logits[row, [t for t in range(128) if t != label][:rank]] = 2.0
            if self.kept is not None:
                logits = logits[:, self.kept]
            found.append(Prediction(places, depth, places, lambda span, x=logits: x[span]))
        return found

    def start(self, *args: object) -> object:
        return NoDrafter().start(*args)  # type: ignore[arg-type]


def test_ranks_are_counted_by_depth() -> None:
    """Of an answer of 13 the last 12 are judged: 11 at depth 1, 10 at depth 2."""
    target, prompt = tiny_target(num_hidden_layers=1), prompts_of(5)[0]
    found = rank_accuracies(target, Planned(None), [prompt], 2, max_new_tokens=13)
    assert [len(row) for row in found] == [2, 2]
    # answer tokens 5..17; places 6..16 at depth 1, 7..16 at depth 2
    ranks = [[(place + depth) % 3 for place in range(5 + depth, 17)] for depth in (1, 2)]
    for row, expected_ranks in zip(found, ranks, strict=True):
        assert row == pytest.approx([expected_ranks.count(r) / len(expected_ranks) for r in (0, 1)])


def test_a_token_outside_the_draft_vocabulary_is_never_right() -> None:
    target, prompt = tiny_target(num_hidden_layers=1), prompts_of(5)[0]
    answer = generate(target, NoDrafter(), [prompt], max_new_tokens=13)[0].ids
    kept = torch.tensor(sorted(set(range(128)) - set(answer)))
    found = rank_accuracies(target, Planned(kept), [prompt], 3, max_new_tokens=13)
    assert found == [[0.0] * 3] * 2


def test_only_trained_depths_are_judged() -> None:
    target = tiny_target(num_hidden_layers=1)
    with pytest.raises(UserError, match="drafter none has no trained depths to judge"):
        rank_accuracies(target, NoDrafter(), prompts_of(4), 3)
    with pytest.raises(UserError, match="answers of 1 tokens do not reach the drafter's 2 depths"):
        rank_accuracies(target, Planned(None), prompts_of(4), 3, max_new_tokens=1)

"""Small shapes lie in large ones: what they accept is read off, exactly."""

from collections.abc import Sequence
from io import StringIO

import pytest
import torch
from rich.console import Console

from drafters.base import Commit
from drafters.errors import UserError
from drafters.growth import BestFirst, Chain, Dynamic, Growth
from drafters.registry import build_drafter
from drafters.sampling import Warp
from drafters.tree import TokenTree
from inference import tune_report
from inference.costs import CostTable, DraftCosts, Load
from inference.sampling import Sampling
from inference.spec import Spec
from inference.tuning import (
    Candidate,
    ChainTrace,
    Largest,
    Shape,
    TreeTrace,
    candidates,
    named,
    probes,
    ranked,
)
from tests.tiny import prompts_of, tiny_target
from tests.unit.test_growth import Markov, coins, table


def judged(tree: TokenTree, truth: Sequence[int]) -> Commit:
    """Follow a text down the tree."""
    path = [0]
    for token in truth:
        below = [c for c in tree.children[path[-1]] if tree.token_list[c] == token]
        if not below:
            break
        path.append(below[0])
    emitted = (*(tree.token_list[node] for node in path[1:]), -1)
    return Commit(tree.tokens[path], -1, tree=tree, emitted=emitted, path=tuple(path))


def grown(growth: Growth, root: int, seed: int) -> TokenTree:
    (tree,) = growth.grow([root], Markov([root], [table(6, seed)]), Warp(), coins(1))
    return tree


def texts(count: int) -> list[list[int]]:
    """Texts that a drafter of `table` is often right about."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for seed in range(count):
        law, text = table(6, seed).softmax(-1), [seed % 6]
        for _ in range(4):
            text.append(int(torch.multinomial(law[text[-1]], 1, generator=generator)))
        found.append(text)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_smaller_tree_lies_in_the_largest(width: int) -> None:
    (largest,) = Largest(4, (width,)).trees()
    trace = TreeTrace()
    commits = [judged(grown(largest, t[0], seed), t[1:]) for seed, t in enumerate(texts(40))]
    for commit in commits:
        trace.add(commit)
    assert len(trace.places) == 40
    for depth in (1, 2, 3, 4):
        for nodes in (1, 2, 3, 5, 8, 12):
            small = Dynamic(nodes, width, depth)
            accepted = [
                judged(grown(small, text[0], seed), text[1:]).accepted
                for seed, text in enumerate(texts(40))
            ]
            assert trace.tau(nodes, depth) == 1 + sum(accepted) / 40, (nodes, depth)


@pytest.mark.slow
def test_every_smaller_best_first_tree_lies_in_the_largest() -> None:
    largest, trace = Largest(4).best(), TreeTrace()
    for seed, text in enumerate(texts(40)):
        trace.add(judged(grown(largest, text[0], seed), text[1:]))
    for nodes in (1, 2, 3, 5, 8, 12, 32):
        small = BestFirst(nodes, 4)
        accepted = [
            judged(grown(small, text[0], seed), text[1:]).accepted
            for seed, text in enumerate(texts(40))
        ]
        assert trace.tau(nodes, 4) == 1 + sum(accepted) / 40, nodes


def test_rounds_that_were_cut_or_end_an_output_say_nothing() -> None:
    """8 tokens, chains of 2 that are right: rounds of 3 at 7, 4 left; the last has 1."""
    target = tiny_target(num_hidden_layers=1, hidden_size=32, intermediate_size=64)
    drafter = build_drafter("draft_model", {"model": target}, target.shape)
    spec, largest = Spec.parse("D"), Largest(2, ())
    found = candidates(target, spec, drafter, prompts_of(5), largest, Sampling(8))
    assert [c.tau for c in found] == [2, 3]
    with pytest.raises(UserError, match="max_new_tokens is 3 and depth 2: give 4 tokens or more"):
        candidates(target, spec, drafter, prompts_of(5), largest, Sampling(3))


def test_every_shorter_chain_lies_in_the_longest() -> None:
    trace = ChainTrace()
    for accepted in (2, 0, 4, 1):
        trace.add(judged(TokenTree.chain([0, 1, 2, 3, 4]), [1, 2, 3, 4][:accepted]))
    assert [trace.tau(gamma) for gamma in (1, 2, 3, 4)] == [1.75, 2.25, 2.5, 2.75]
    assert [trace.ready(gamma) for gamma in (1, 3, 4)] == [0.5, 0.25, 0]
    trace.add(judged(TokenTree.chain([0, 1]), []))  # a look-up that found one token
    assert [trace.drafted(gamma) for gamma in (1, 4)] == [1.0, 17 / 5]


def test_shapes_are_ranked_by_tau_over_the_round() -> None:
    costs = DraftCosts({(1, 1, 0): 1.0}, {(1, 1, 0): 1.0}, {(1, 1, 0): 0.0})
    costs_table = CostTable(
        {(1, 0, 1): 8.0, (1, 0, 3): 8.0, (1, 0, 5): 12.0}, {(1, 0): 0.0}, {"d": costs}
    )
    shapes = [
        Candidate(f"gamma={gamma}", "d", Shape(gamma, gamma), tau)
        for gamma, tau in ((1, 1.5), (2, 1.75), (4, 1.875))
    ]
    found = ranked(costs_table, shapes, Load(1, 0))
    assert [(c.spec, value) for c, value in found] == [
        ("gamma=2", 1.75 * 8 / 10),
        ("gamma=1", 1.5 * 8 / 9),
        ("gamma=4", 1.875 * 8 / 16),
    ]
    # on a device of its own the chain of 1 has its next draft ready every other time
    ready = [Candidate("gamma=1", "d", Shape(1, 1), 1.5, 0.5)]
    assert ranked(costs_table, ready, Load(1, 0), overlap=True)[0][1] == 1.5 * 8 / 8.5
    assert ranked(costs_table, ready, Load(1, 0))[0][1] == 1.5 * 8 / 9


def test_candidates_of_a_drafter_that_is_the_target() -> None:
    """It accepts everything: tau is gamma + 1, for chains and in trees; the specs can be read."""
    target = tiny_target(num_hidden_layers=1, hidden_size=32, intermediate_size=64)
    drafter = build_drafter("draft_model", {"model": target}, target.shape)
    found = candidates(
        target,
        Spec.parse("D"),
        drafter,
        prompts_of(5, 9),
        Largest(3, (2,)),
        Sampling(max_new_tokens=13),
    )
    chains = [c for c in found if "chain" in c.spec]
    assert [c.spec for c in chains] == [f"D:growth=chain,gamma={g}" for g in (1, 2, 3)]
    assert [c.tau for c in chains] == [2, 3, 4]
    trees = [c for c in found if "dynamic" in c.spec]
    assert all(c.tau <= c.shape.levels + 1 for c in trees)
    assert max(c.tau for c in trees) > 3
    for one in found:
        growth = Spec.parse(one.spec).growth
        assert growth.depth == one.shape.levels
        assert growth.expanded == one.shape.width


def test_drawn_chains_are_weighed_where_laws_are_no_point_masses() -> None:
    target = tiny_target(num_hidden_layers=1, hidden_size=32, intermediate_size=64)
    spec, largest, warp = Spec.parse("ngram:longest=2"), Largest(2, ()), Warp(1.0)
    assert [chain.draft for chain in largest.chains(warp)] == ["argmax", "sampled"]
    medusa = build_drafter("medusa", {"draft_vocab_size": 64}, target.shape)
    sampling = Sampling(max_new_tokens=6, warp=warp)
    found = candidates(target, Spec.parse("D"), medusa, prompts_of(5), largest, sampling)
    assert [c.spec for c in found] == [
        f"D:growth=chain,gamma={g}{d}" for d in ("", ",draft=sampled") for g in (1, 2)
    ]
    # a look-up has no laws to draw from: no second set
    prompt = [[1, 2, 3, 1, 2]]
    found = candidates(target, spec, spec.load(target), prompt, largest, sampling)
    assert [c.spec for c in found] == [f"ngram:longest=2,growth=chain,gamma={g}" for g in (1, 2)]


def test_every_candidates_costs_are_timed() -> None:
    target = tiny_target(num_hidden_layers=1)
    drafter = build_drafter("ngram", {}, target.shape)
    largest = Largest(3, (2, 4))
    timed = probes(drafter, largest, Warp(1.0))
    assert {(p.key.split(":", 1)[1], p.width, p.growth.depth) for p in timed} == {
        (f"{kind}:{draft}", width, depth)
        for kind in ("fixed", "weighed")
        for draft, width in (("argmax", 1), ("argmax", 2), ("argmax", 4), ("sampled", 1))
        for depth in (1, 3)
    } | {("fixed:argmax", nodes, depth) for nodes in (8, 32) for depth in (1, 3)}
    assert isinstance(timed[0].growth, Chain)
    assert named(Spec.parse("ngram:longest=4"), "gamma=2") == "ngram:longest=4,gamma=2"


def test_the_table_keeps_long_folders_short() -> None:
    spec = "/a/very/long/way/to/runs/demo/eagle/best:growth=dynamic,nodes=10,width=3,depth=5"
    shapes = [{"spec": spec, "tau": 2.0, "predicted": 1.5}]
    tried = [{"spec": spec, "tau": 2.0, "measured": 1.25, "interval": (1.0, 1.5)}]
    load = {"rows": 16, "context": 4000, "temperature": 0.7, "shapes": shapes, "tried": tried}
    console = Console(width=120, record=True, file=StringIO())
    target = {"title": "T", "dtype": "float32"}
    console.print(tune_report.table({"target": target, "loads": [load]}, top=5))
    (line,) = [line for line in console.export_text().splitlines() if "dynamic" in line]
    wanted = "16 4000 0.7 eagle/best dynamic 10/3/5 2.00 1.50 1.25 1.00-1.50"
    assert line.split() == wanted.split()


def test_of_shapes_that_are_as_good_the_first_of_the_table_is_advised() -> None:
    shapes = [
        {"spec": f"D:growth=dynamic,nodes={n},width=3,depth=2", "predicted": 1.3} for n in (5, 7)
    ]
    where = {"rows": 1, "context": 200, "temperature": 0.0, "experts_hit": {}}
    [line] = tune_report.advice({"loads": [{**where, "shapes": shapes, "tried": []}]})
    assert "nodes=5," in line


def test_advice_names_the_best_and_says_where_nothing_pays() -> None:
    shapes = [
        {"spec": "D:growth=chain,gamma=2", "predicted": 1.5},
        {"spec": "D:growth=chain,gamma=1", "predicted": 1.4},
    ]
    tried = [
        {"spec": "D:growth=chain,gamma=2", "measured": 1.2},
        {"spec": "D:growth=cost_aware", "measured": 1.25},
    ]
    poor = [{"spec": "D:growth=chain,gamma=1", "predicted": 0.9}]
    where = {"context": 200, "temperature": 0.0, "experts_hit": {}}
    loads = [
        {"rows": 1, **where, "shapes": shapes, "tried": tried},
        {"rows": 4, **where, "shapes": shapes, "tried": []},
        {"rows": 16, **where, "shapes": poor, "tried": [], "experts_hit": {"1": 2, "4": 5.5}},
    ]
    assert tune_report.advice({"loads": loads}) == [
        "1 row, context 200, T=0: --drafter D:growth=cost_aware (measured 1.25)",
        "4 rows, context 200, T=0: --drafter D:growth=chain,gamma=2 (predicted 1.50)",
        "16 rows, context 200, T=0: speculation does not pay (predicted 0.90)",
        "16 rows, context 200, T=0: experts hit a layer by n tokens a row: 1: 2.0, 4: 5.5",
    ]

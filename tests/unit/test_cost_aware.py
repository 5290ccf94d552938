"""Cost-aware growth: nodes that pay, none that do not, and nothing done while it sleeps."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from drafters.base import Commit
from drafters.errors import UserError
from drafters.growth import (
    Chain,
    CostAware,
    CostAwareGrowth,
    Dynamic,
    Growth,
    Prices,
    build_growth,
)
from drafters.growth.cost_aware import confident_scores
from drafters.growth.rows import DrawnRow, ScoredRow
from drafters.registry import build_drafter
from drafters.sampling import RowRandom, Warp
from drafters.session import CachedSession
from drafters.target import Target
from drafters.tree import TokenTree
from inference.engine import Decoder, Request
from inference.stop import Stop
from inference.verify import lossless
from tests.tiny import ScriptedDrafter, prompts_of, tiny_target
from tests.unit.test_growth import Markov, coins, table

FREE = Prices(((1, 1.0),))
DEAR = Prices(((1, 1.0), (2, 4.0)), first=1.0, level=1.0)
STEPS = Prices(((1, 1.0), (5, 1.0), (9, 2.0)), first=0.0625, level=0.0625)


def laws(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows).log()


def grow(growth: CostAwareGrowth, guesser: Markov, warp: Warp | None = None) -> list[TokenTree]:
    roots = guesser.roots.tolist()
    trees = growth.grow(roots, guesser, warp or Warp(), coins(len(roots)))
    for tree in trees:
        tree.check()
        assert tree.drafted <= growth.nodes
        assert int(tree.depth.max()) <= growth.depth
    return trees


def test_a_stated_chance_goes_to_the_best_child_and_the_rest_to_its_siblings() -> None:
    value = torch.tensor([[[0.6, 0.3], [1.0, 0.0]]]).log()
    scores = confident_scores(value, torch.tensor([[0.8, 0.4]])).exp()
    torch.testing.assert_close(scores, torch.tensor([[[0.8, 0.15], [0.4, 0.0]]]))


def test_scores_of_stated_chances_are_logs_of_chances() -> None:
    """Rounding lifts .4 / (1 - .6) above 1, and what cannot come has no logarithm."""
    value = torch.tensor([[[0.6, 0.4], [1.0, 0.0]]]).log()
    scores = confident_scores(value, torch.zeros(1, 2))
    assert bool((scores <= 0).all())
    assert bool(scores.isfinite().all())


class Sure(Markov):
    """A guesser that states one chance for whatever is drafted after any node."""

    chance = 0.8

    def confidence(self) -> Tensor:
        nodes = self.frontiers[-1].tokens if self.frontiers else self.roots[:, None]
        return torch.full(nodes.shape, self.chance)


def test_what_is_stated_counts_not_what_the_law_says() -> None:
    """Rounds a second of 1, .5, .45: a chance of .8 pays for no first draft, .99 would."""
    prices = Prices(((1, 1.0), (2, 2.0), (3, 1 / 0.45)))
    certain = laws([0.01, 0.99], [0.01, 0.99])
    warp = Warp(1.0)
    limits = CostAware(nodes=2, width=1, depth=2, draft="sampled")
    (lawful,) = grow(limits.priced(prices), Markov([0], [certain]), warp)
    (stated,) = grow(limits.priced(prices), Sure([0], [certain]), warp)
    assert lawful.drafted == 2
    assert stated.drafted == 0


def test_stated_chances_are_the_scores_of_point_masses() -> None:
    """A chance of .8 for the best child, and of what is left three quarters for the next."""
    logits = laws(*[[0.6, 0.3, 0.1]] * 3)
    (tree,) = grow(CostAware(4, 2, 1).priced(FREE), Sure([0], [logits]))
    assert tree.token_list == [0, 0, 1]
    assert tree.confidence is not None
    torch.testing.assert_close(tree.confidence.exp(), torch.tensor([1.0, 0.8, 0.15]))


def test_a_node_is_kept_while_its_survival_pays() -> None:
    """Free up to 5 tokens, a quarter each behind them: a fifth level promises half of .39."""
    sure = laws([0.1, 0.9, 0.0], [0.1, 0.1, 0.8], [0.6, 0.3, 0.1])
    limits = CostAware(nodes=8, width=1, depth=6)
    (tree,) = grow(limits.priced(STEPS), Markov([0], [sure]))
    assert tree.token_list == [0, 1, 2, 0, 1]
    assert tree.confidence is not None
    expected = torch.tensor([1.0, 0.9, 0.8, 0.6, 0.9]).log().cumsum(0)
    torch.testing.assert_close(tree.confidence, expected)


def test_the_likeliest_of_the_newest_nodes_go_on() -> None:
    origin = {1: 0, 2: 0, 3: 1}
    row = ScoredRow(0, survivals=[0.5, 0.1, 0.3, 0.4], newest=[*origin], origin=origin)
    row.choose(2)
    assert (row.frontier, row.above) == ([3, 2], [1, 0])
    assert DrawnRow(7).last == 7


def test_siblings_compete_with_depth() -> None:
    flat = laws([0.45, 0.4, 0.15], [0.45, 0.4, 0.15], [0.45, 0.4, 0.15])
    (tree,) = grow(CostAware(nodes=4, width=2, depth=2).priced(FREE), Markov([0], [flat]))
    # .45, .4, then .2025 and two of .18, of which the elder has room
    assert tree.token_list == [0, 0, 1, 0, 1]
    assert tree.parent_list == [-1, 0, 0, 1, 1]


def test_levels_that_do_not_pay_are_not_drafted() -> None:
    guesser = Markov([0], [laws([0.2, 0.4, 0.4], [0.4, 0.3, 0.3], [0.4, 0.3, 0.3])])
    (tree,) = grow(CostAware(8, 1, 6).priced(STEPS), guesser)
    # levels are taken to be accepted by half: .4 reaches on for .2 + .1 of which .0625 a level
    assert len(guesser.frontiers) == 2
    assert tree.drafted == 3
    guesser = Markov([0], [laws([0.2, 0.4, 0.4], [0.4, 0.3, 0.3], [0.4, 0.3, 0.3])])
    (tree,) = grow(CostAware(8, 1, 6).priced(DEAR), guesser)
    assert (tree.token_list, guesser.frontiers) == ([0], [])


def test_rows_share_what_pays() -> None:
    """A node of either costs a quarter: .96, .92, .88 of one row pay, .4 of the other, not .16."""
    sure = laws([0.02, 0.96, 0.02], [0.02, 0.96, 0.02], [0.3, 0.3, 0.4])
    growth = CostAware(8, 1, 6).priced(Prices(((1, 1.0), (3, 1.5)), level=0.01))
    trees = grow(growth, Markov([0, 2], [sure]))
    assert [tree.drafted for tree in trees] == [3, 1]


@pytest.mark.parametrize("draft", ["argmax", "sampled"])
def test_reduced_vocabularies_come_back_as_target_ids(draft: str) -> None:
    ids = torch.tensor([4, 7, 9])
    growth = CostAware(6, 2, 3, draft).priced(FREE)
    (tree,) = grow(growth, Markov([5], [table(10)[:, :3]], ids), Warp(1.0))
    assert set(tree.token_list[1:]) <= {4, 7, 9}
    assert tree.drafted >= 3
    assert (tree.laws is not None) == (draft == "sampled")
    assert tree.laws is None or tree.laws.ids is ids


def test_no_more_nodes_are_expanded_than_the_width() -> None:
    guesser = Markov([0, 1], [table(6)])
    trees = grow(CostAware(20, 2, 3).priced(FREE), guesser)
    assert [frontier.tokens.shape for frontier in guesser.frontiers] == [(2, 2), (2, 2)]
    assert [tree.drafted for tree in trees] == [2 + 4 + 4] * 2


def test_a_width_beyond_the_vocabulary() -> None:
    (tree,) = grow(CostAware(20, 8, 2).priced(FREE), Markov([0], [table(3)]))
    assert tree.drafted == 3 + 9


def test_drawn_chains_carry_their_laws_and_their_laws_mode() -> None:
    logits, warp = table(6), Warp(0.7, top_k=3)
    trees = grow(CostAware(4, 1, 4, "sampled").priced(FREE), Markov([2, 4], [logits]), warp)
    for tree in trees:
        assert tree.drafted == 4
        assert tree.laws is not None
        assert tree.confidence is not None
        for node in range(1, 5):
            law = tree.laws.drawn_from(node)
            assert law is not None
            above = tree.token_list[node - 1]
            torch.testing.assert_close(law.weights, warp.laws(logits[above][None]).probs[0])
            step = tree.confidence[node] - tree.confidence[node - 1]
            torch.testing.assert_close(step, law.weights.max().log())


def test_whether_a_token_is_submitted_does_not_depend_on_it() -> None:
    """All draws at a node lead to a chain that holds it, or none does."""
    logits, warp = laws([0.4, 0.3, 0.3], [0.96, 0.02, 0.02], [0.4, 0.3, 0.3]), Warp(1.0)
    growth = CostAware(4, 1, 3, "sampled").priced(Prices(((1, 1.0), (2, 1.18)), level=0.01))
    lengths: dict[tuple[int, ...], set[bool]] = {}
    for seed in range(200):
        random = coins(seed + 1)[seed:]
        (tree,) = growth.start(1).grow([0], Markov([0], [logits]), warp, random)
        for size in range(1, len(tree) + 1):
            lengths.setdefault(tuple(tree.token_list[:size]), set()).add(size < len(tree))
    assert all(len(found) == 1 for found in lengths.values())
    # one continues below 1 (sure of the next), not below 0 or 2
    assert {k for k, v in lengths.items() if len(k) == 2 and True in v} == {(0, 1)}


def test_greedy_drawn_drafts_are_chains_of_the_most_likely() -> None:
    (tree,) = grow(CostAware(4, 3, 3, "sampled").priced(FREE), Markov([1], [table(6)]), Warp(0.0))
    (chain,) = Chain(3).grow([1], Markov([1], [table(6)]), Warp(), coins(1))
    assert tree.token_list == chain.token_list
    assert tree.is_chain


def test_options_and_refusals() -> None:
    limits = build_growth("cost_aware", {"nodes": 5, "depth": 2, "draft": "sampled"})
    assert limits == CostAware(5, 3, 2, "sampled")
    assert (limits.depth, limits.nodes, limits.cells, limits.levels) == (2, 5, 1, 2)
    assert CostAware(5, 3, 4).cells == 9
    for options in ({"nodes": 0}, {"width": 0}, {"depth": 0}, {"draft": "both"}, {"prices": 1}):
        with pytest.raises(UserError):
            build_growth("cost_aware", options)
    guesser = Markov([0], [table(3)])
    refused: list[Callable[[], object]] = [
        lambda: limits.start(1),
        lambda: limits.member(0, 1),
        lambda: limits.budget([0.5]),
        lambda: limits.grow([0], guesser, Warp(), coins(1)),
    ]
    for asked in refused:
        with pytest.raises(UserError) as raised:
            asked()
        assert str(raised.value) == (
            "growth cost_aware decides by measured costs and got none: give "
            "CostAware(...).priced(prices); inference.pricing.priced measures them"
        )
    limits.observe([])


def asleep(growth: CostAwareGrowth) -> CostAwareGrowth:
    growth.ledger.asleep = True
    return growth


@pytest.mark.parametrize("draft", ["argmax", "sampled"])
def test_a_trial_drafts_one_level_and_one_node_at_least(draft: str) -> None:
    logits = laws([0.4, 0.3, 0.3], [0.4, 0.3, 0.3], [0.4, 0.3, 0.3])
    for prices in (DEAR, FREE):
        growth = asleep(CostAware(6, 1, 4, draft).priced(prices))
        guesser = Markov([0, 1], [logits])
        assert [tree.drafted for tree in grow(growth, guesser, Warp(1.0))] == [1, 1]
        assert guesser.frontiers == []


def test_a_trial_keeps_all_that_pays() -> None:
    logits = laws([0.4, 0.3, 0.3], [0.4, 0.3, 0.3], [0.4, 0.3, 0.3])
    (tree,) = grow(asleep(CostAware(6, 3, 4).priced(FREE)), Markov([0], [logits]))
    assert tree.token_list == [0, 0, 1, 2]
    dear = asleep(CostAware(6, 3, 4).priced(DEAR))
    (tree,) = grow(dear, Markov([0], [logits]))
    assert tree.token_list == [0, 0]
    assert (dear.budget([0.4]), dear.budget([])) == (1, 1)
    assert asleep(CostAware(6, 3, 4).priced(FREE)).budget([0.4, 0.3]) == 2


def test_a_budget_is_what_is_worth_it() -> None:
    growth = CostAware(8, 1, 4).priced(STEPS)
    assert growth.budget([0.5, 0.5, 0.5, 0.5, 0.2]) == 4
    assert growth.budget([0.5, 0.5, 0.5, 0.5, 0.3]) == 5
    assert CostAware().priced(DEAR).budget([0.5]) == 0


@pytest.mark.parametrize("draft", ["argmax", "sampled"])
def test_a_level_that_would_only_just_pay_is_not_drafted(draft: str) -> None:
    """A certain first draft; the second level promises a half and costs it."""
    sure = torch.full((3, 3), -torch.inf).fill_diagonal_(0.0)
    for cost, levels in ((0.5, 1), (0.49, 2)):
        guesser = Markov([0, 1], [sure])
        growth = CostAware(4, 1, 2, draft).priced(Prices(((1, 1.0),), level=cost))
        trees = grow(growth, guesser, Warp(1.0))
        assert [tree.drafted for tree in trees] == [levels] * 2
        assert len(guesser.frontiers) == levels - 1


@pytest.mark.parametrize("draft", ["argmax", "sampled"])
def test_no_row_has_more_nodes_than_it_may(draft: str) -> None:
    guesser = Markov([0, 3], [table(6)])
    trees = grow(CostAware(2, 1, 5, draft).priced(FREE), guesser, Warp(1.0))
    assert [tree.drafted for tree in trees] == [2, 2]
    assert len(guesser.frontiers) == (4 if draft == "argmax" else 1)
    assert CostAware(2, 1, 5).priced(FREE).levels == 2
    assert CostAware(7, 1, 5).priced(FREE).levels == 5


@pytest.mark.parametrize("draft", ["argmax", "sampled"])
def test_chances_are_asked_for_by_level(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    growth = CostAware(4, 1, 3, draft).priced(FREE)
    asked: list[int] = []

    def chance(level: int, sure: float) -> float:
        asked.append(level)
        return sure

    monkeypatch.setattr(growth.ledger, "chance", chance)
    grow(growth, Markov([0, 3], [table(6)]), Warp(1.0))
    assert asked == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("draft", ["argmax", "sampled"])
def test_rows_pay_for_what_they_hold_in_the_mean(draft: str) -> None:
    """Two certain nodes a row are free, a third costs eight rounds."""
    sure = torch.full((3, 3), -torch.inf).fill_diagonal_(0.0)
    growth = CostAware(8, 1, 4, draft).priced(Prices(((1, 1.0), (3, 1.0), (4, 9.0))))
    guesser = Markov([0, 1], [sure])
    assert [tree.drafted for tree in grow(growth, guesser, Warp(1.0))] == [2, 2]
    assert len(guesser.frontiers) == 1


def test_a_growth_and_its_members_start_without_history() -> None:
    members = (DEAR, STEPS)
    growth = CostAware(4, 1, 3).priced(FREE, members)
    assert repr(growth) == ("CostAwareGrowth(CostAware(nodes=4, width=1, depth=3, draft='argmax'))")
    again = growth.start(2)
    assert again is not growth
    assert again.ledger is not growth.ledger
    assert (again.limits, again.prices, again.members) == (growth.limits, FREE, members)
    member = growth.member(1, 2)
    assert (member.limits, member.prices, member.members) == (growth.limits, STEPS, ())
    assert CostAware(4, 1, 3).priced(FREE).member(1, 2).prices is FREE
    assert growth.ledger.depth == 3


def test_what_was_not_judged_is_not_counted() -> None:
    growth = CostAware(4, 1, 3).priced(FREE)
    before = growth.ledger.promise()
    growth.observe([None, Commit(torch.tensor([1]), 2, emitted=(2,))])
    assert (growth.ledger.promise(), growth.ledger.rate) == (before, 1.0)
    tree = TokenTree.chain([0, 1])
    growth.observe([None, Commit(tree.tokens, 2, tree=tree, emitted=(1, 2), path=(0, 1))])
    assert growth.ledger.promise() > before


def test_levels_are_judged_as_far_as_they_were_drafted() -> None:
    """Two levels are drafted and one node is kept: the second level was missed if one is right."""
    logits = laws([0.1, 0.9], [0.5, 0.5])
    growth = CostAware(1, 1, 2).priced(FREE)
    (tree,) = grow(growth, Markov([0], [logits]))
    assert tree.token_list == [0, 1]
    growth.observe([Commit(tree.tokens, 0, tree=tree, emitted=(1, 0), path=(0, 1))])
    # accepted, then missed: (1 + 2 * .5) / 3 and (0 + 2 * 2/3) / 3
    assert growth.ledger.promise()[0] == pytest.approx(2 / 3 + 2 / 3 * 4 / 9)


def test_a_tree_that_was_cut_is_judged_as_far_as_it_went() -> None:
    """The limit leaves one level of three: the others were not missed, they were not asked."""
    sure = laws([0.1, 0.9], [0.9, 0.1])
    growth = CostAware(3, 1, 3).priced(FREE)
    before = growth.ledger.promise(1.0, above=1)
    (tree,) = grow(growth, Markov([0], [sure]))
    assert tree.drafted == 3
    cut = tree.limit(1)
    growth.observe([Commit(cut.tokens, 0, tree=cut, emitted=(1, 0), path=(0, 1))])
    after = growth.ledger.promise(1.0, above=1)
    assert after[0] > before[0]  # the first level was accepted, which speaks for the second too


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=2, hidden_size=32, intermediate_size=64)


def plain(target: Target, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    decoder = Decoder(
        target,
        build_drafter("none", {}, target.shape),
        Chain(1),
        rows=len(prompts),
        capacity=64,
        warp=Warp(),
        stop=Stop(),
    )
    return run(decoder, prompts, new)


def run(decoder: Decoder, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    decoder.admit({i: Request(p, new, RowRandom(i)) for i, p in enumerate(prompts)})
    while decoder.running:
        decoder.round()
    rows = [row for row in decoder.rows if row is not None]
    return [row.ids[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def decoder_of(target: Target, name: str, prices: Prices, rows: int) -> Decoder:
    torch.manual_seed(3)
    options: dict[str, object] = {"draft_vocab_size": 64, "taps": [0, 1]} if name == "eagle" else {}
    drafter = build_drafter(name, options, target.shape)
    if isinstance(drafter, torch.nn.Module):
        drafter.eval()
    growth = CostAware(6, 2, 3).priced(prices)
    return Decoder(
        target, drafter, growth, rows=rows, capacity=64, warp=Warp(), stop=Stop(), verify="lossless"
    )


def test_a_sleeping_session_neither_drafts_nor_encodes(target: Target) -> None:
    """The drafter never agrees: after a few rounds the session is not asked until a trial."""
    prompts = prompts_of(6)
    decoder = decoder_of(target, "eagle", Prices(((1, 1.0),), first=0.375, level=0.125), 1)
    session = decoder.session
    assert isinstance(session, CachedSession)
    decoder.admit({0: Request(prompts[0], 50, RowRandom(0))})
    encoded, drafted = [], []
    while decoder.running:
        (commit,) = decoder.round()
        assert commit is not None
        assert commit.tree is not None
        drafted.append(commit.tree.drafted)
        encoded.append(int(session.cache.lengths[0]))
    row = decoder.rows[0]
    assert row is not None
    assert row.ids[6:] == plain(target, prompts, 50)[0]
    asleep = drafted.index(0)
    assert asleep < 15
    assert drafted[asleep : asleep + 16] == [0] * 16
    assert encoded[asleep : asleep + 16] == [encoded[asleep - 1]] * 16
    assert drafted[asleep + 16] > 0  # the trial
    assert encoded[asleep + 16] == encoded[asleep] + 17  # and what waited was encoded for it


@pytest.mark.parametrize("name", ["eagle", "ngram", "medusa"])
@pytest.mark.parametrize("prices", [FREE, STEPS, DEAR], ids=["free", "steps", "dear"])
def test_greedy_output_is_the_targets_own(target: Target, name: str, prices: Prices) -> None:
    prompts = prompts_of(20, 5, 13)
    decoder = decoder_of(target, name, prices, rows=3)
    assert run(decoder, prompts, 24) == plain(target, prompts, 24)


def test_a_drafter_that_is_right_is_followed_to_full_depth(target: Target) -> None:
    """A session that proposes by itself is judged by levels."""
    prompts = prompts_of(5)
    truth = plain(target, prompts, 40)
    growth = CostAware(8, 1, 4).priced(FREE)
    drafter = ScriptedDrafter(truth)
    decoder = Decoder(
        target, drafter, growth, rows=1, capacity=64, warp=Warp(), stop=Stop(), verify="lossless"
    )
    assert run(decoder, prompts, 40) == truth
    assert isinstance(decoder.growth, CostAwareGrowth)
    assert decoder.growth.levels == 4
    assert decoder.growth.ledger.rate > 3
    assert growth.ledger.rate == 1  # a decoder's history is its own


def throughput(
    growth: Growth, drafter: Tensor, truth: Tensor, prices: Prices, rounds: int, skip: int = 0
) -> float:
    """Decode with laws that depend on the last token; return tokens per plain round's time."""
    growth = growth.start(1)
    random, warp = RowRandom(1), Warp(1.0)
    root, tokens, spent = 0, 0, 0.0
    for number in range(rounds):
        tree, levels = TokenTree.chain([root]), 0
        if growth.levels:
            guesser = Markov([root], [drafter])
            (tree,) = growth.grow([root], guesser, warp, [random.draft])
            levels = len(guesser.frontiers) + 1
        verdict = lossless(warp.laws(truth[tree.tokens]), tree, random.verify)
        emitted = (*(tree.token_list[node] for node in verdict.path[1:]), verdict.token)
        path = tuple(verdict.path)
        seen = Commit(tree.tokens[list(path)], verdict.token, tree=tree, emitted=emitted, path=path)
        growth.observe([seen])
        root = verdict.token
        if number >= skip:
            tokens += len(emitted)
            spent += prices.tokens(len(tree)) + prices.drafting(levels)
    return tokens / spent


CPU = Prices(((1, 1.0), (5, 1.0), (8, 1.1), (16, 1.5), (32, 2.5)), first=0.09, level=0.06)


@pytest.mark.slow
def test_a_drafter_that_is_always_wrong_costs_next_to_nothing() -> None:
    """Flat laws that have nothing to do with the target's; counted from the start."""
    truth, wrong = 3 * table(60, 1), 0.3 * table(60, 2)
    for draft in ("argmax", "sampled"):
        growth = CostAware(8, 3, 6, draft).priced(CPU)
        assert throughput(growth, wrong, truth, CPU, 600) > 0.97
    sure = 5 * table(60, 3)  # wrong and sure of it
    assert throughput(CostAware(8, 3, 6).priced(CPU), sure, truth, CPU, 600) > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [1.0, 2.0, 4.0])
def test_it_decodes_as_fast_as_the_best_fixed_shape(sharpness: float) -> None:
    truth = sharpness * table(30, 1)
    drafter = truth + 0.5 * sharpness * table(30, 2)
    fixed: list[Growth] = [Chain(1), Chain(2), Dynamic(3, 3, 2), Dynamic(6, 3, 3)]
    best = max(throughput(growth, drafter, truth, CPU, 250, 50) for growth in fixed)
    own = throughput(CostAware(8, 3, 6).priced(CPU), drafter, truth, CPU, 250, 50)
    assert own > max(1.0, best)

"""Drafters together: merging, choosing by what was learned, what each member sees."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from drafters.base import Commit, Features
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.growth import Chain, CostAware, Growth, Prices
from drafters.laws import Laws
from drafters.merge import merge
from drafters.methods.hybrid import HybridDrafter, choose
from drafters.registry import build_drafter
from drafters.sampling import RowRandom, Warp
from drafters.survival import Ballot, Survival, Votes
from drafters.target import Target
from drafters.tree import TokenTree
from inference import generate
from inference.bench import contenders
from inference.spec import Spec
from tests.tiny import ScriptedDrafter, prompts_of, tiny_target

SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(**SIZES)


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.token_list[n] for n in tree.path(m)) for m in range(len(tree))}


def test_fixed_trees_share_their_paths() -> None:
    left, right = TokenTree.chain([9, 1, 2, 3]), TokenTree.from_paths(9, [[1, 2, 5], [4]])
    tree, places = merge([left, right])
    tree.check()
    assert paths(tree) == paths(left) | paths(right)
    assert tree.laws is None
    for part, nodes in zip((left, right), places, strict=True):
        for node, place in enumerate(nodes):
            assert part.token_list[node] == tree.token_list[place]
            assert len(part.path(node)) == len(tree.path(place))


def test_drawn_nodes_stay_and_are_elder() -> None:
    """Two drawn 1s stay apart, the fixed 1 joins the first and brings its child along."""
    laws = [Laws(torch.tensor([w]), ids, torch.tensor([0])) for w, ids in _LAWS]
    drawn = [TokenTree.chain([0, 1], one) for one in laws]
    fixed = TokenTree.from_paths(0, [[1, 2], [3]])
    tree, places = merge([fixed, *drawn])
    tree.check()
    assert tree.token_list == [0, 1, 1, 3, 2]
    assert tree.parent_list == [-1, 0, 0, 0, 1]
    assert places == [[0, 1, 4, 3], [0, 1], [0, 2]]
    assert tree.laws is not None
    assert tree.laws.of_list == [0, 1, -1, -1]
    second = tree.laws.drawn_from(2)
    assert second is not None
    assert second.weight(1) == pytest.approx(0.75)
    assert second.weight(3) == 0


_LAWS = [([0.5, 0.5, 0.0, 0.0], None), ([0.25, 0.75], torch.tensor([0, 1]))]


def test_ballots_are_taken_at_their_word_until_they_are_judged() -> None:
    survival = Survival()
    sure, first, second = Ballot(0, 9), Ballot(1, -1), Ballot(1, -2)
    assert survival.chance(1, Votes((sure,))) == pytest.approx(0.975)
    assert survival.chance(1, Votes((first,))) == 0.5
    assert survival.chance(1, Votes((second,))) == 0.25
    assert survival.chance(1, Votes((sure, first))) == pytest.approx(0.975)


def test_the_member_that_is_right_gets_the_budget() -> None:
    """Member 1 is always right, member 0 never: after some rounds only 1's nodes are submitted."""
    survival = Survival()
    drafted = {0: TokenTree.chain([9, 1, 1, 1]), 1: TokenTree.chain([9, 2, 3, 4])}
    draft, tree = choose(drafted, survival, Chain(3))
    assert paths(tree) == {(9,), (9, 1), (9, 2), (9, 1, 1)}  # alike: the earlier member's stay
    for _ in range(6):
        survival.observe(draft, [2, 3, 4, 5])
    draft, tree = choose(drafted, survival, Chain(3))
    assert paths(tree) == {(9,), (9, 2), (9, 2, 3), (9, 2, 3, 4)}
    assert tree.confidence is not None
    assert tree.confidence.exp()[1] > 0.8


def test_agreement_is_learned_apart() -> None:
    """Alone against the other a member is wrong, together they are right."""
    survival = Survival()
    apart = {0: TokenTree.chain([9, 1]), 1: TokenTree.chain([9, 2])}
    together = {0: TokenTree.chain([9, 1]), 1: TokenTree.chain([9, 1])}
    for _ in range(10):
        survival.observe(choose(apart, survival, Chain(2))[0], [3])
        survival.observe(choose(together, survival, Chain(2))[0], [1])
    ballots = Ballot(0, -1), Ballot(1, -1)
    assert survival.chance(1, Votes(ballots)) > 0.8
    assert survival.chance(1, Votes(ballots[:1], (1,))) < 0.2


def test_without_learning_nothing_is_counted() -> None:
    survival = Survival(learn=False)
    drafted = {0: TokenTree.chain([9, 1]), 1: TokenTree.chain([9, 2])}
    for _ in range(4):
        survival.observe(choose(drafted, survival, Chain(2))[0], [2])
    assert survival.chance(1, Votes((Ballot(0, -1),))) == 0.5


class Reader:
    """A member that notes which features it is shown."""

    name = "reader"

    def __init__(self, features: Features) -> None:
        self.features = features
        self.seen: list[Commit] = []

    def options(self) -> dict[str, object]:
        return {}

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "Reader":
        return self

    def observe(self, commits: Sequence[Commit | None]) -> None:
        self.seen += [commit for commit in commits if commit is not None]

    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        return [
            None if coins is None else TokenTree.chain([self.seen[-1].root]) for coins in random
        ]


def test_every_member_sees_its_own_features(target: Target) -> None:
    read = [Features((1,)), Features((0, 2), last=True), Features()]
    members = [Reader(features) for features in read]
    both = HybridDrafter(members)
    assert both.features == Features((0, 1, 2), last=True)
    alone = Reader(both.features)
    for drafter in (both, alone):
        generate(target, drafter, prompts_of(5), growth=Chain(2), max_new_tokens=4)
    width = target.shape.hidden_size
    for commits in zip(*(member.seen for member in members), alone.seen, strict=True):
        one, two, bare, whole = commits
        low, middle, high = whole.taps.split(width, -1)
        assert torch.equal(one.taps, middle)
        assert torch.equal(two.taps, torch.cat((low, high), -1))
        assert torch.equal(two.last, whole.last)
        assert one.last is bare.last is bare.taps is None


def test_two_that_are_right_by_turns(target: Target) -> None:
    """One is right where the other is wrong: together they are always right."""
    prompts = prompts_of(6, 9)
    plain = build_drafter("none", {}, target.shape)
    truth = [out.ids for out in generate(target, plain, prompts, max_new_tokens=13)]
    parts = [ScriptedDrafter(truth, wrong) for wrong in ([3, 0], [0, 3])]
    for part in parts:
        part.options = dict  # type: ignore[method-assign]
    for growth, tau in ((Chain(6), 4.0), (Chain(3), None)):
        outputs = generate(
            target, HybridDrafter(parts), prompts, growth=_Deep(growth.gamma), max_new_tokens=13
        )
        assert [out.ids for out in outputs] == truth
        if tau:
            assert [out.tau for out in outputs] == [tau, tau]


class _Deep(Chain):
    """Members draft three levels, whatever the budget is."""

    @property
    def depth(self) -> int:
        return 3


def test_a_member_that_never_pays_rests(target: Target) -> None:
    """Its own ledger, with its own price, stops asking it; the other one goes on."""
    [prompt] = prompts_of(6)
    plain = build_drafter("none", {}, target.shape)
    truth = [out.ids for out in generate(target, plain, [prompt], max_new_tokens=60)]
    right, wrong = ScriptedDrafter(truth), ScriptedDrafter(truth, [0])
    asked = {"right": 0, "wrong": 0}
    for name, part in (("right", right), ("wrong", wrong)):
        part.options = dict  # type: ignore[method-assign]
        part.start = _counting(part.start, name, asked)  # type: ignore[method-assign]
    verify = ((1, 1.0), (4, 1.2), (9, 2.0))
    members = [Prices(verify, 0.05, 0.05), Prices(verify, 0.5, 0.5)]
    growth = CostAware(3, 1, 2).priced(Prices(verify, 0.1, 0.1), members)
    [out] = generate(
        target, HybridDrafter([right, wrong]), [prompt], growth=growth, max_new_tokens=60
    )
    assert out.ids == truth[0]
    assert out.tau > 2.5
    assert asked["right"] >= 15
    assert asked["wrong"] < asked["right"] / 2


def _counting(start, name: str, asked: dict[str, int]):
    def started(*arguments):
        session = start(*arguments)
        propose = session.propose

        def counted(warp, random):
            asked[name] += 1
            return propose(warp, random)

        session.propose = counted
        return session

    return started


def test_specs_join_drafters(target: Target, tmp_path: Path) -> None:
    medusa = build_drafter("medusa", {"draft_vocab_size": 64}, target.shape)
    folder = save_drafter(medusa, tmp_path / "m", target)
    spec = Spec.parse(f"ngram:longest=5+{folder}:growth=dynamic,nodes=6,width=2,depth=3")
    assert (spec.growth_name, spec.growth.nodes, spec.folders) == ("dynamic", 6, [folder])
    [contender] = contenders(target, [spec])
    drafter = contender.drafter
    assert isinstance(drafter, HybridDrafter)
    assert [member.name for member in drafter.members] == ["ngram", "medusa"]
    assert drafter.members[0].options()["longest"] == 5
    last = Spec.parse("none+ngram:longest=5,gamma=2").load(target)
    assert isinstance(last, HybridDrafter)
    assert last.members[1].options()["longest"] == 5
    loaded = load_drafter("ngram+none", target)
    assert isinstance(loaded, HybridDrafter)


def test_a_folder_with_a_plus_is_one_drafter(target: Target, tmp_path: Path) -> None:
    medusa = build_drafter("medusa", {"draft_vocab_size": 64}, target.shape)
    folder = save_drafter(medusa, tmp_path / "a+b", target)
    assert Spec.parse(f"{folder}:gamma=2").load(target).name == "medusa"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram+", r"'ngram\+': give A\+B"),
        ("+ngram", r"'\+ngram': give A\+B"),
        ("ngram:gamma=2+none", r"gamma stands before the last \+"),
        ("ngram:longest+none", "'longest' is not key=value"),
        ("ngram+nothing", "no drafter is called 'nothing'"),
        ("ngram:lenght=2+none", "drafter ngram has no option 'lenght'"),
        ("hybrid", r"joins two drafters or more: give A\+B"),
    ],
)
def test_mistakes(text: str, message: str, target: Target) -> None:
    with pytest.raises(UserError, match=message):
        Spec.parse(text).load(target)

"""Rules equal Hugging Face's processors, each node's by its own path, for target and drafter."""

from collections.abc import Sequence

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from drafters.errors import UserError
from drafters.frontier import Frontier
from drafters.growth import Chain, Dynamic, Growth, Static
from drafters.registry import build_drafter
from drafters.rules import Context, GuidedWarp, Rules
from drafters.sampling import Warp
from drafters.target import Target
from drafters.tree import TokenTree
from inference.generate import Generation, Output
from inference.sampling import Sampling
from tests.tiny import prompts_of, tiny_target

IDS = [3, 7, 7, 1, 3]
TREE = TokenTree.from_paths(3, [[7, 1, 3], [7, 2], [5, 7, 7]])
BIAS = {(4,): 2.5, (7, 1): -3.0, (3, 7): 1.5, (1, 3, 7, 1): 4.0}
WORDS = [[6], [7, 7], [3, 7, 1], [0]]


def other_parity(ids: Sequence[int]) -> list[int]:
    """A06: the next id has the parity opposite to the last one."""
    return [token for token in range(128) if (token + ids[-1]) % 2]


def few(ids: Sequence[int]) -> list[int]:
    return [token for token in range(12) if (token + int(ids[-1])) % 3]


PROCESSORS = {
    "logit_bias": (BIAS, lambda: SequenceBiasLogitsProcessor(BIAS)),
    "repetition_penalty": (1.7, lambda: RepetitionPenaltyLogitsProcessor(1.7)),
    "bad_words": (WORDS, lambda: NoBadWordsLogitsProcessor(WORDS, eos_token_id=0)),
    "allowed": (few, lambda: PrefixConstrainedLogitsProcessor(lambda _, ids: few(ids), 1)),
}


@pytest.mark.parametrize("names", [*[[name] for name in PROCESSORS], list(PROCESSORS)], ids=str)
def test_every_node_equals_hugging_face_on_its_own_path(names: list[str]) -> None:
    logits = torch.randn(len(TREE), 12, generator=torch.Generator().manual_seed(0)) * 3
    rules = Rules(**{name: PROCESSORS[name][0] for name in names})
    found = rules.over(TREE, logits, Context(IDS, 2, frozenset({0})))
    legal = {0}
    for node in range(len(TREE)):
        parent, token = TREE.parent_list[node], TREE.token_list[node]
        if node and not (parent in legal and found[parent, token] > -torch.inf):
            assert torch.equal(found[node], logits[node])  # a forbidden path asks nothing
            continue
        legal.add(node)
        path = [TREE.token_list[n] for n in TREE.path(node)[1:]]
        processors = LogitsProcessorList([PROCESSORS[name][1]() for name in names])
        ids = torch.tensor([[*IDS, *path]])
        assert torch.allclose(found[node], processors(ids, logits[node : node + 1])[0])
    assert len(legal) > 1


def test_presence_and_frequency_count_the_output_only() -> None:
    """Output 7, 1, 3 after a prompt of two; below it 7 and 7 again."""
    rules = Rules(presence_penalty=0.5, frequency_penalty=0.25)
    tree = TokenTree.chain([3, 7, 7])
    found = rules.over(tree, torch.zeros(3, 8), Context(IDS, 2, frozenset()))
    assert found.tolist() == [
        [0, -0.75, 0, -0.75, 0, 0, 0, -0.75],
        [0, -0.75, 0, -0.75, 0, 0, 0, -1.0],
        [0, -0.75, 0, -0.75, 0, 0, 0, -1.25],
    ]


def test_the_constraint_is_asked_about_paths_that_it_allowed_and_that_go_on() -> None:
    asked: list[list[int]] = []

    def allowed(ids: Sequence[int]) -> list[int]:
        asked.append(list(ids[len(IDS) :]))
        return other_parity(ids)

    tree = TokenTree.from_paths(3, [[4, 5, 6], [5, 6], [4, 1, 2]])
    context = Context(IDS, 2, frozenset({1}))
    Rules(allowed=allowed).over(tree, torch.zeros(len(tree), 12), context)
    assert asked == [[], [4], [4, 5], [4, 5, 6]]


class Marginals:
    """A guesser of two levels on four kept ids."""

    ids = torch.tensor([1, 3, 7, 9])

    def root_logits(self) -> torch.Tensor:
        return torch.zeros(1, 4)

    def step(self, frontier: Frontier) -> torch.Tensor:
        return torch.zeros(1, frontier.tokens.shape[1], 4)


def test_the_drafter_is_ruled_on_its_own_ids() -> None:
    rules = Rules(logit_bias={(9, 7): 2.0, (3,): 1.0, (2,): 5.0}, bad_words=[[1], [7, 9]])
    warp = GuidedWarp.of(Warp(1.0, rules=rules), [None, Context(IDS, 2, frozenset())])
    guesser = warp.guide(Marginals(), [1])
    assert guesser.root_logits().tolist() == [[-torch.inf, 1.0, 0.0, 0.0]]
    after = guesser.step(Frontier(torch.tensor([[7, 9]]), torch.tensor([[0, 0]]), 1))
    assert after.tolist() == [[[-torch.inf, 1.0, 0.0, -torch.inf], [-torch.inf, 1.0, 2.0, 0.0]]]
    last = guesser.step(Frontier(torch.tensor([[7]]), torch.tensor([[1]]), 2))
    assert last.tolist() == [[[-torch.inf, 1.0, 0.0, -torch.inf]]]


def test_a_drafter_without_a_kept_id_that_is_allowed_drafts_what_will_be_refused() -> None:
    rules = Rules(allowed=lambda ids: [2])
    guesser = GuidedWarp.of(Warp(rules=rules), [Context(IDS, 2, frozenset())]).guide(
        Marginals(), [0]
    )
    assert guesser.root_logits().tolist() == [[0, 0, 0, 0]]


def test_without_rules_a_warp_leaves_the_guesser_alone() -> None:
    guesser = Marginals()
    assert Warp(0.7).guide(guesser, [0]) is guesser


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


HF = {
    "A05 penalty": (Rules(repetition_penalty=1.5), {"repetition_penalty": 1.5}),
    "A06 constraint": (
        Rules(allowed=other_parity),
        {"prefix_allowed_tokens_fn": lambda _, ids: other_parity(ids.tolist())},
    ),
    "all": (
        Rules({(5,): 3.0, (9, 4): -8.0}, 1.3, bad_words=[[11], [40, 41]], allowed=other_parity),
        {
            "sequence_bias": {(5,): 3.0, (9, 4): -8.0},
            "repetition_penalty": 1.3,
            "bad_words_ids": [[11], [40, 41]],
            "prefix_allowed_tokens_fn": lambda _, ids: other_parity(ids.tolist()),
        },
    ),
}
SHAPES = [
    ("none", Chain(1)),
    ("ngram", Chain(4)),
    ("draft_model", Chain(4)),
    ("eagle", Static((3, 2, 2))),
    ("medusa", Dynamic(6, 3, 3)),
]


def run(
    target: Target, name: str, growth: Growth, prompts: list[list[int]], warp: Warp
) -> list[Output]:
    torch.manual_seed(0)
    options = {"draft_model": {"model": target}, "eagle": {"taps": [0, 2]}}.get(name, {})
    drafter = build_drafter(name, options, target.shape)
    if isinstance(drafter, torch.nn.Module):
        drafter = drafter.eval()
    return Generation(
        target, drafter, prompts, growth=growth, sampling=Sampling(12, warp), rows=2
    ).run()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "all")) for name in HF]
)
def test_greedy_outputs_equal_hugging_face(target: Target, name: str) -> None:
    rules, options = HF[name]
    prompts = prompts_of(7, 3)
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            pad_token_id=0,
            **options,
        )
        wanted.append(made[0, len(prompt) :].tolist())
    plain = [output.ids for output in run(target, "none", Chain(1), prompts, Warp())]
    assert wanted != plain
    for drafter, growth in SHAPES:
        outputs = run(target, drafter, growth, prompts, Warp(rules=rules))
        assert [output.ids for output in outputs] == wanted, drafter
        if drafter == "draft_model":  # the target drafts for itself, under the same rules
            assert all(sum(o.accepted) == sum(o.attempted) for o in outputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0: give more than 0; 1 is off"),
        ({"bad_words": [[1], []]}, "bad_words holds an empty sequence"),
        ({"logit_bias": {(): 1.0}}, "logit_bias holds an empty sequence"),
    ],
)
def test_values_out_of_range_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Rules(**options)


def test_ids_beyond_the_vocabulary_are_named_before_model_work(target: Target) -> None:
    for rules in Rules(bad_words=[[3, 128]]), Rules(logit_bias={(128,): 1.0}):
        with pytest.raises(UserError, match="holds id 128: give 0 to 127"):
            run(target, "none", Chain(1), [[1]], Warp(rules=rules))


def test_a_dead_end_is_an_error(target: Target) -> None:
    rules = Rules(allowed=lambda ids: [5] if len(ids) < 4 else [])
    with pytest.raises(UserError, match=r"the rules leave no token after \[1, 2, 5, 5\]"):
        run(target, "none", Chain(1), [[1, 2]], Warp(rules=rules))


def test_what_is_set_is_reported() -> None:
    assert Rules().report() == {}
    rules = Rules({(1, 2): 3.0}, frequency_penalty=0.5, allowed=few)
    assert rules.report() == {
        "logit_bias": [[[1, 2], 3.0]],
        "frequency_penalty": 0.5,
        "allowed": True,
    }

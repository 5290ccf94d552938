"""Block drafters: one mask, one alignment, training equal to decoding; what each family adds."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.base import Batch, Commit
from drafters.block import BlockDrafter, context_keys
from drafters.blocks import Blocks, spread
from drafters.correction import CorrectedGuesser
from drafters.errors import UserError
from drafters.frontier import Frontier
from drafters.growth import BestFirst, Chain, CostAware, Prices
from drafters.losses import LossSettings, drafter_loss
from drafters.methods.dflash import DFlashDrafter
from drafters.methods.dflash2 import DFlash2Drafter, Selector, TwoTap
from drafters.methods.dspark import DSparkDrafter
from drafters.methods.none import NoDrafter
from drafters.registry import method
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from drafters.teacher import Teacher
from drafters.tree import TokenTree
from inference import generate
from tests.tiny import prompts_of, tiny_target

FAMILIES = ["dflash", "dflash2", "dspark"]
SLOTS = 3


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(hidden_size=32, intermediate_size=64, initializer_range=0.3)


def make(target: Target, name: str, **options: object) -> BlockDrafter[Any]:
    """Build a drafter away from its special starting point."""
    torch.manual_seed(3)
    given = {"taps": [0, 1], "slots": SLOTS, "draft_vocab_size": 48, **options}
    drafter = method(name).build(given, target.shape)
    assert isinstance(drafter, BlockDrafter)
    if drafter.vocabulary.size:
        drafter.vocabulary.keep(torch.randperm(128)[:48].sort().values)
    drafter.init_from(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return drafter.eval()


def batch_of(target: Target, drafter: BlockDrafter[Any], *lengths: int, seed: int = 0) -> Batch:
    """Make rows of random tokens, all supervised; shorter ones are padded."""
    rows = prompts_of(*lengths, seed=seed)
    width = max(lengths)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    document = torch.where(real, 0, -1)
    position = torch.arange(width).expand_as(ids)
    taps, last = target.forward_batch(ids, document, position, drafter.features)
    return Batch(ids, real.clone(), document, position, taps, last)


def logits_of(
    drafter: BlockDrafter[Any], target: Target, batch: Batch
) -> dict[tuple[int, int], Tensor]:
    """Return {(anchor, depth): logits} over flat anchors."""
    found: dict[tuple[int, int], Tensor] = {}
    with torch.no_grad():
        for prediction in drafter.predict(batch, target):
            rows = prediction.logits(slice(None))
            for anchor, row in zip(prediction.group.tolist(), rows, strict=True):
                found[anchor, prediction.depth] = row
    return found


def moved(before: dict[Any, Tensor], after: dict[Any, Tensor]) -> set[Any]:
    assert before.keys() == after.keys()
    return {key for key in before if not torch.allclose(before[key], after[key], atol=1e-5)}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_alone_is_the_block_among_many(name: str, target: Target) -> None:
    drafter = make(target, name)
    batch = batch_of(target, drafter, 12, 9)
    every = logits_of(drafter, target, batch)
    assert {anchor for anchor, _ in every} == {*range(11), *range(12, 20)}
    for anchor in (0, 4, 8, 15):
        row, place = divmod(anchor, 12)
        mask = torch.zeros_like(batch.label_mask)
        mask[row, place : place + SLOTS + 1] = batch.label_mask[row, place : place + SLOTS + 1]
        alone = logits_of(drafter, target, replace(batch, label_mask=mask))
        depths = [depth for a, depth in alone if a == anchor]
        assert depths == [d for a, d in every if a == anchor]
        for depth in depths:
            torch.testing.assert_close(alone[anchor, depth], every[anchor, depth])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "attention_bias": True}], ids=str)
def test_training_logits_are_decoding_logits(
    name: str, options: dict[str, object], target: Target
) -> None:
    """From a cache of true features up to the anchor, round after round, rows of unequal length."""
    drafter = make(target, name, **options)
    batch = batch_of(target, drafter, 14, 11)
    wanted = logits_of(drafter, target, batch)
    session = drafter.start(target, Chain(SLOTS), 2, 20)
    ends = [[4, 7, 8], [2, 3, 6]]  # the root of each round
    compared = 0
    for turn in range(3):
        commits = []
        for row in range(2):
            first = ends[row][turn - 1] if turn else 0
            span = slice(first, ends[row][turn])
            assert batch.taps is not None
            tree = TokenTree.chain(batch.ids[row, span]) if turn else None
            commits.append(
                Commit(
                    batch.ids[row, span],
                    int(batch.ids[row, ends[row][turn]]),
                    taps=batch.taps[row, span],
                    tree=tree,
                )
            )
        session.observe(commits)
        with torch.inference_mode():
            session._encode([0, 1])
            guesser = session.guesser([0, 1])
            logits = [guesser.root_logits()]
            for depth in range(1, SLOTS):
                true = [int(batch.ids[row, ends[row][turn] + depth]) for row in range(2)]
                logits.append(guesser.step(frontier(true, depth))[:, 0])
        for row in range(2):
            for depth in range(1, SLOTS + 1):
                anchor = row * 14 + ends[row][turn]
                torch.testing.assert_close(
                    logits[depth - 1][row], wanted[anchor, depth], atol=1e-5, rtol=1e-4
                )
                compared += 1
    assert compared == 2 * 3 * SLOTS


def frontier(tokens: list[int], depth: int) -> Frontier:
    nodes = torch.tensor(tokens)[:, None]
    return Frontier(nodes, torch.zeros_like(nodes), depth)


@pytest.mark.parametrize("name", FAMILIES)
def test_features_are_read_strictly_before_the_anchor(name: str, target: Target) -> None:
    drafter = make(target, name)
    batch = batch_of(target, drafter, 12)
    assert batch.taps is not None
    taps = batch.taps.clone()
    taps[0, 5] += 1
    found = moved(
        logits_of(drafter, target, batch),
        logits_of(drafter, target, replace(batch, taps=taps)),
    )
    assert {anchor for anchor, _ in found} == {6, 7, 8, 9, 10}


def test_which_token_moves_which_guess(target: Target) -> None:
    """Slots of dflash know the anchor alone, those of the others the token before them too."""
    for name in FAMILIES:
        drafter = make(target, name)
        batch = batch_of(target, drafter, 12)
        kept = drafter.ids
        assert kept is not None
        ids = batch.ids.clone()
        ids[0, 6], other = kept[0], batch.ids.clone()
        other[0, 6] = kept[1]
        found = moved(
            logits_of(drafter, target, replace(batch, ids=ids)),
            logits_of(drafter, target, replace(batch, ids=other)),
        )
        own = {(6, depth) for depth in (1, 2, 3)}
        assert found == (own if name == "dflash" else own | {(5, 2), (4, 3)})


@pytest.mark.parametrize("name", FAMILIES)
def test_the_dth_guess_imitates_position_a_plus_d_minus_1(name: str, target: Target) -> None:
    drafter = make(target, name)
    batch = batch_of(target, drafter, 9, 9)
    batch.label_mask[0, :3] = False
    batch.label_mask[0, 6] = False  # another turn: blocks end before it
    first, second, third = drafter.predict(batch, target)
    assert first.group.tolist() == [2, 3, 4, 6, 7, *range(9, 17)]
    assert second.group.tolist() == [2, 3, 6, *range(9, 16)]
    assert third.group.tolist() == [2, *range(9, 15)]
    for depth, prediction in enumerate((first, second, third), start=1):
        assert prediction.depth == depth
        assert torch.equal(prediction.positions, prediction.group + depth - 1)


def test_the_anchors_own_slot_guesses_where_slots_guess_the_next_token(target: Target) -> None:
    assert [make(target, name).length for name in FAMILIES] == [SLOTS + 1, SLOTS + 1, SLOTS]
    drafter = make(target, "dspark", markov_rank=0)
    batch = batch_of(target, drafter, 8)
    blocks = Blocks(batch, 20, SLOTS, vary=False)
    with torch.no_grad():
        states = drafter.states(batch, target, blocks)
    logits = logits_of(drafter, target, batch)
    torch.testing.assert_close(drafter.head(states)[0, 2, 1].detach(), logits[2, 2])


@pytest.mark.parametrize("name", FAMILIES)
def test_documents_of_a_row_are_apart(name: str, target: Target) -> None:
    drafter = make(target, name)
    one, two = (batch_of(target, drafter, n, seed=n) for n in (7, 9))
    assert one.taps is not None
    assert two.taps is not None
    packed = Batch(
        torch.cat((one.ids, two.ids), 1),
        torch.cat((one.label_mask, two.label_mask), 1),
        torch.tensor([[0] * 7 + [1] * 9]),
        torch.cat((one.position, two.position), 1),
        torch.cat((one.taps, two.taps), 1),
        torch.cat((one.last, two.last), 1),
    )
    together = logits_of(drafter, target, packed)
    apart = logits_of(drafter, target, one)
    apart |= {(a + 7, d): x for (a, d), x in logits_of(drafter, target, two).items()}
    assert together.keys() == apart.keys()
    assert not moved(together, apart)


def test_what_one_layer_reads_at_the_start_is_the_targets_own(target: Target) -> None:
    """The highest tap feeds the last two layers: the first makes their keys and values exactly."""
    drafter = DSparkDrafter.build({"taps": [0, 1], "draft_vocab_size": 0}, target.shape)
    drafter.init_from(target)
    batch = batch_of(target, drafter, 6)
    assert batch.taps is not None
    state = target.layer_state(2)
    hidden = batch.taps[..., 32:]
    normed = torch.nn.functional.rms_norm(
        hidden, (32,), state["input_layernorm.weight"], target.shape.norm_epsilon
    )
    with torch.no_grad():
        context = drafter.context_norm(drafter.fusion(batch.taps))
        flat = torch.zeros(1, 6, dtype=torch.int64)
        key, value = context_keys(drafter.decoder_layers()[0], context, drafter.rotary(flat))
    torch.testing.assert_close(key.flatten(2), normed @ state["self_attn.k_proj.weight"].T)
    torch.testing.assert_close(value.flatten(2), normed @ state["self_attn.v_proj.weight"].T)
    states = torch.randn(4, 32)
    torch.testing.assert_close(drafter.head(states), target.head(states))
    torch.testing.assert_close(drafter.norm.weight, target.norm_state()["weight"])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_a_batch_without_an_anchor_teaches_nothing(name: str, weights: str, target: Target) -> None:
    drafter = make(target, name).train()
    batch = batch_of(target, drafter, 9, 4)
    batch.label_mask[:] = False
    batch.label_mask[0, 0] = True  # there is no token before it
    predictions = drafter.predict(batch, target)
    assert [len(p.positions) for p in predictions] == [0] * SLOTS
    settings = LossSettings(mix={"ce": 1.0}, depth_weights=weights)
    sums = drafter_loss(predictions, batch, Teacher(target, drafter.ids), settings)
    assert all(bool((part == 0).all()) for part in sums)
    logits = [p.logits(slice(None)).sum() for p in predictions]
    torch.stack(logits).sum().backward()
    for parameter in drafter.parameters():
        assert parameter.grad is None or bool((parameter.grad == 0).all())


def test_anchors_are_spread_and_all_have_their_turn() -> None:
    candidates = torch.zeros(2, 20, dtype=torch.bool)
    candidates[0, 3:17] = True
    candidates[1, [2, 9]] = True
    even = spread(candidates, 4, vary=False)
    assert even.sum(1).tolist() == [4, 2]
    assert even[1].nonzero()[:, 0].tolist() == [2, 9]
    torch.manual_seed(0)
    counts = torch.zeros(20)
    for _ in range(400):
        drawn = spread(candidates, 4, vary=True)
        assert drawn.sum(1).tolist() == [4, 2]
        assert not bool((drawn & ~candidates).any())
        counts += drawn[0]
    assert float(counts[3:17].min()) > 400 * 4 / 14 * 0.6


def test_anchors_are_limited_in_a_sequence(target: Target) -> None:
    drafter = make(target, "dspark", anchors=3)
    batch = batch_of(target, drafter, 12, 6)
    blocks = Blocks(batch, 3, SLOTS, vary=False)
    assert blocks.anchors.shape == (2, 3)
    assert len(drafter.predict(batch, target)[0].positions) == 6


def test_without_its_head_a_markov_drafter_has_marginals(target: Target) -> None:
    """Rank 0 is the same as weights of zero: the law of the slot alone."""
    drafter = make(target, "dspark")
    batch = batch_of(target, drafter, 10)
    with torch.no_grad():
        drafter.correction.after.weight.zero_()  # type: ignore[union-attr]
    none = make(target, "dspark", markov_rank=0, confidence=False)
    own = {k: v for k, v in drafter.state_dict().items() if not k.startswith("correction")}
    none.load_state_dict(own, strict=True)
    assert not moved(logits_of(drafter, target, batch), logits_of(none, target, batch))
    assert none.predict(batch, target)[0].auxiliary == {}


def test_at_the_start_the_additions_of_dflash2_do_nothing(target: Target) -> None:
    plain = DFlashDrafter.build(
        {"taps": [0, 1], "slots": SLOTS, "draft_vocab_size": 0}, target.shape
    )
    options = {"taps": [0, 1], "slots": SLOTS, "draft_vocab_size": 0, "candidates": 128}
    drafter = DFlash2Drafter.build(options, target.shape)
    plain.init_from(target)
    drafter.init_from(target)
    batch = batch_of(target, plain, 10)
    found = logits_of(drafter.eval(), target, batch)
    assert not moved(found, logits_of(plain.eval(), target, batch))


def test_a_selector_scores_the_likeliest_tokens_anew() -> None:
    torch.manual_seed(0)
    selector = Selector(7, 5, 3, candidates=3).eval().requires_grad_(False)
    torch.nn.init.normal_(selector.after.weight)
    unary, state = torch.randn(2, 1, 7), torch.randn(2, 1, 5)
    previous = torch.tensor([[0, 6, 7, 2], [1, 7, 3, 3]])
    found = selector(unary, state, previous)
    for row, column in itertools.product(range(2), range(4)):
        a = selector.before.weight[previous[row, column]]
        wanted = a * (selector.gate.weight @ state[row, 0])
        chosen = unary[row, 0].topk(3).indices.tolist()
        scores = {b: float(unary[row, 0, b] + selector.after.weight[b] @ wanted) for b in chosen}
        law = found[row, column].softmax(-1)
        assert law.topk(3).indices.sort().values.tolist() == sorted(chosen)
        assert float(law[chosen].sum()) == pytest.approx(1.0)
        best = max(scores, key=lambda b: scores[b])
        assert int(law.argmax()) == best
        for b in chosen:
            assert float(found[row, column, b]) == pytest.approx(scores[b], abs=1e-5)


def test_a_convolution_looks_back_within_its_block() -> None:
    torch.manual_seed(0)
    taps = TwoTap(8, length=3, channels=4)
    x = torch.randn(6, 8)
    assert torch.equal(taps.mix(x, taps.kernels(x)[:, 0]), x)
    torch.nn.init.normal_(taps.dynamic.weight)
    taps.base.data[0, 1] = 0.5
    kernel = taps.kernels(x)[:, 0]
    changing = (taps.dynamic.weight @ x[4]).view(2, 2, 2).repeat_interleave(4, -1)[0]
    expected = (1 + changing[0]) * x[4] + (0.5 + changing[1]) * x[3]
    torch.testing.assert_close(taps.mix(x, kernel)[4], expected)
    torch.testing.assert_close(taps.mix(x, kernel)[3], kernel[3, 0] * x[3])  # a block's first


def test_confidence_of_decoding_is_that_of_training(target: Target) -> None:
    drafter = make(target, "dspark")
    batch = batch_of(target, drafter, 9)
    session = drafter.start(target, Chain(SLOTS), 1, 20)
    assert batch.taps is not None
    session.observe([Commit(batch.ids[0, :5], int(batch.ids[0, 5]), taps=batch.taps[0, :5])])
    session._encode([0])
    with torch.inference_mode():
        guesser = session.guesser([0])
        assert isinstance(guesser, CorrectedGuesser)
        guesser.root_logits()
        found = [guesser.confidence()]
        for depth in range(1, SLOTS):
            guesser.step(frontier([int(batch.ids[0, 5 + depth])], depth))
            found.append(guesser.confidence())
    for prediction, chance in zip(drafter.predict(batch, target), found, strict=True):
        assert chance is not None
        place = prediction.group.tolist().index(5)
        wanted = prediction.auxiliary["confidence"][place].sigmoid()
        torch.testing.assert_close(chance[0, 0], wanted.detach(), atol=1e-5, rtol=1e-4)


def test_confidence_decides_what_is_verified(target: Target) -> None:
    """A drafter sure of its first token and of nothing after it drafts one token a round."""
    drafter = make(target, "dspark")
    prices = Prices(((1, 1.0), (2, 1.3), (4, 1.9)), first=0.01, level=0.0)
    growth = CostAware(3, 1, 3).priced(prices)
    batch = batch_of(target, drafter, 9)
    assert batch.taps is not None
    commit = Commit(batch.ids[0, :5], int(batch.ids[0, 5]), taps=batch.taps[0, :5])
    sizes = []
    for bias in (-9.0, 9.0):
        with torch.no_grad():
            drafter.correction.sure.weight.zero_()  # type: ignore[union-attr]
            drafter.correction.sure.bias.fill_(bias)  # type: ignore[union-attr]
        session = drafter.start(target, growth.start(1), 1, 20)
        session.observe([commit])
        (tree,) = session.propose(Warp(), [RowRandom(0)])
        assert tree is not None
        sizes.append(tree.drafted)
    assert sizes == [0, 3]


@pytest.mark.parametrize("name", FAMILIES)
def test_more_levels_than_slots_are_refused(name: str, target: Target) -> None:
    drafter = make(target, name)
    with pytest.raises(UserError, match=r"4 levels deep and this drafter has 3 slots"):
        drafter.start(target, Chain(4), 1, 20)
    drafter.start(target, BestFirst(20, 3), 1, 20)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dflash", {"slots": 0}, "slots is 0: give 1 or more"),
        ("dflash", {"markov_rank": 2}, "unknown key 'markov_rank'"),
        ("dflash2", {"candidates": 0}, "candidates is 0: give 1 or more"),
        ("dflash2", {"channels": 5}, "channels is 5: give a divisor of the target's width 32"),
        ("dspark", {"anchors": 0}, "anchors is 0: give 1 or more"),
        ("dspark", {"markov_rank": -1}, "markov_rank is -1"),
        ("dspark", {"init": "zeros"}, "init = 'zeros' is not allowed"),
    ],
)
def test_wrong_options_are_refused(
    name: str, options: dict[str, object], message: str, target: Target
) -> None:
    with pytest.raises(UserError, match=message):
        method(name).build({"taps": [0, 1], **options}, target.shape)


def test_the_last_two_layers_input_is_read_unless_told() -> None:
    shape = replace(tiny_target().shape, num_layers=30)
    assert DFlashDrafter.build({}, shape).features.layers == (1, 14, 27)


@pytest.mark.parametrize("name", FAMILIES)
def test_a45_what_is_learned_is_accepted(name: str, target: Target) -> None:
    """An oracle is within reach: the loss goes to zero and every guess is taken."""
    prompts = prompts_of(6, 6, seed=2)
    texts = [o.ids for o in generate(target, NoDrafter(), prompts, max_new_tokens=22)]
    drafter = make(target, name, draft_vocab_size=0).train()
    ids = torch.tensor([p + t for p, t in zip(prompts, texts, strict=True)])
    document, position = torch.zeros_like(ids), torch.arange(28).expand_as(ids)
    taps, last = target.forward_batch(ids, document, position, drafter.features)
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), document, position, taps, last)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2, weight_decay=0.0)
    settings, teacher = LossSettings(kind="ce", decay=1.0), Teacher(target, None)
    value = 9.0
    for _ in range(60):
        sums = drafter_loss(drafter.predict(batch, target), batch, teacher, settings)
        loss = sums.loss.sum() / sums.weight.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = float(loss.detach())
    assert value < 0.05
    outputs = generate(target, drafter.eval(), prompts, growth=Chain(SLOTS), max_new_tokens=22)
    assert [o.ids for o in outputs] == texts
    assert sum(len(o.ids) - 1 for o in outputs) / sum(o.rounds for o in outputs) > SLOTS

"""EAGLE-3: training unrolls exactly what decoding does, and every flag is what it says."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import drafters.session
from drafters.base import Batch
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.formats.convert import read_ours
from drafters.growth import Chain, Dynamic, Growth, Static
from drafters.methods.eagle import EagleDrafter, EagleOptions
from drafters.methods.none import NoDrafter
from drafters.sampling import Warp
from drafters.session import CachedSession
from drafters.target import Target
from drafters.tree import TokenTree
from inference import generate
from tests.forced import Forced, by_slot
from tests.neural import (
    away,
    batch_of,
    check_accepted,
    check_documents_do_not_see_each_other,
    check_every_label_is_predicted_once,
    check_later_tokens_change_nothing,
    commits_of,
    learn,
    randoms,
)
from tests.tiny import prompts_of, tiny_model, tiny_target

UNROLL = 4
FLAGS: dict[str, dict[str, object]] = {
    "plain": {},
    "reduced": {"draft_vocab_size": 48},
    "eagle3.1": {"tap_norm": True, "norm_output": True},
    "residual": {"norm_before_residual": True},
    "qwen": {"qk_norm": True, "attention_bias": True},
    "two_layers": {"layers": 2},
    "lent_head": {"draft_vocab_size": 48, "head": "target"},
    "two_taps": {"taps": [0, 6]},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=8, initializer_range=0.2)


def make(target: Target, **options: object) -> EagleDrafter:
    """Build a drafter away from every special starting point."""
    return away(EagleDrafter, target, 0.02, **{"unroll": UNROLL, **options})


@pytest.mark.parametrize("name", FLAGS)
def test_training_steps_equal_decoding_steps(name: str) -> None:
    """Step j at slot t is j self-fed steps on a cache of true features up to t.

    Rows of unequal length; the features arrive in two commits, with a proposal between them, so
    that guesses must be gone again. In double precision, so that nothing hides in rounding.
    """
    target = Target(tiny_model(num_hidden_layers=8, initializer_range=0.2).double())
    drafter = make(target, **FLAGS[name]).double()
    ids = torch.tensor(prompts_of(18, 18, 18))
    batch = batch_of(target, drafter, ids)
    trained = by_slot(drafter.predict(batch, target))
    lengths = [5, 9, 13]
    growth = Forced([ids[row, n + 1 : n + UNROLL].tolist() for row, n in enumerate(lengths)])
    session = drafter.start(target, growth, 3, 24)
    session.observe(commits_of(batch, [3, 3, 3]))
    session.propose(Warp(), randoms(3))
    session.observe(commits_of(batch, lengths, start=3))
    session.propose(Warp(), randoms(3))
    assert len(growth.logits) == UNROLL
    for step, logits in enumerate(growth.logits):
        for row, length in enumerate(lengths):
            expected = trained[step, row * 18 + length - 1]
            torch.testing.assert_close(logits[row], expected, atol=1e-9, rtol=1e-9)


def test_predictions_cover_every_supervised_label_once(target: Target) -> None:
    check_every_label_is_predicted_once(target, make(target))


def test_a_batch_without_labels_predicts_nothing(target: Target) -> None:
    drafter = make(target)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(6)))
    batch.label_mask[:] = False
    predictions = drafter.predict(batch, target)
    assert [len(p.positions) for p in predictions] == [0] * UNROLL
    assert predictions[2].logits(slice(0, 0)).shape == (0, 128)


def test_later_tokens_change_nothing(target: Target) -> None:
    check_later_tokens_change_nothing(target, make(target))


def test_packed_documents_do_not_see_each_other(target: Target) -> None:
    check_documents_do_not_see_each_other(target, make(target))


def test_padding_changes_nothing(target: Target) -> None:
    drafter = make(target)
    text = prompts_of(8)[0]
    ids = torch.tensor([text + [0] * 5])
    document = torch.tensor([[0] * 8 + [-1] * 5])
    padded = by_slot(drafter.predict(batch_of(target, drafter, ids, document), target))
    alone = by_slot(drafter.predict(batch_of(target, drafter, torch.tensor([text])), target))
    assert padded.keys() == alone.keys()
    for key, logits in alone.items():
        torch.testing.assert_close(padded[key], logits, atol=1e-4, rtol=1e-4)


def test_gradients_flow_through_all_steps(target: Target) -> None:
    """The last step alone reaches the fusion and every other parameter."""
    drafter = make(target, tap_norm=True, norm_output=True, layers=2)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(10)))
    last = drafter.predict(batch, target)[-1]
    last.logits(slice(0, len(last.group))).square().mean().backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def proposals(
    session: CachedSession, batch: Batch, lengths: Sequence[int], asked: Sequence[bool]
) -> list[TokenTree]:
    """Commit a row piece by piece; propose after the pieces that are asked for."""
    trees = []
    for start, stop, ask in zip([0, *lengths], lengths, asked, strict=False):
        session.observe(commits_of(batch, [stop], start))
        if ask:
            tree = session.propose(Warp(), randoms(1))[0]
            assert tree is not None
            trees.append(tree)
    return trees


@pytest.mark.parametrize("growth", [Chain(4), Static((3, 2)), Dynamic(7, 3, 3)], ids=str)
def test_a13_rounds_without_a_proposal_lose_nothing(growth: Growth, target: Target) -> None:
    drafter = make(target)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(20)))
    lengths = [4, 5, 8, 9, 12]
    every, some = (
        proposals(drafter.start(target, growth, 1, 30), batch, lengths, asked)
        for asked in ([True] * 5, [True, False, False, True, True])
    )
    for expected, tree in zip([every[0], every[3], every[4]], some, strict=True):
        assert tree.token_list == expected.token_list
        assert tree.parent_list == expected.parent_list


def test_proposing_twice_proposes_the_same(target: Target) -> None:
    drafter = make(target)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(8)))
    session = drafter.start(target, Static((2, 2)), 1, 20)
    session.observe(commits_of(batch, [6]))
    first, again = (session.propose(Warp(), randoms(1))[0] for _ in range(2))
    assert first is not None
    assert again is not None
    assert first.token_list == again.token_list


def test_long_prompts_are_encoded_in_chunks(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(target)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(20, 20, 20)))

    def trees() -> list[list[int]]:
        session = drafter.start(target, Chain(3), 3, 30)
        session.observe(commits_of(batch, [19, 4, 9]))
        return [t.token_list for t in session.propose(Warp(), randoms(3)) if t is not None]

    whole = trees()
    monkeypatch.setattr(drafters.session, "_CHUNK", 4)
    assert trees() == whole


def test_a_prefill_starts_its_row_afresh_and_leaves_the_others(target: Target) -> None:
    drafter = make(target)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(12, 12)))
    session = drafter.start(target, Chain(3), 2, 20)
    session.observe(commits_of(batch, [7, 9]))
    first = session.propose(Warp(), randoms(2))
    swapped = Batch(*(x.flip(0) for x in asdict(batch).values()))
    session.observe([commits_of(swapped, [9])[0], None])
    assert session.propose(Warp(), [None, None]) == [None, None]
    second = session.propose(Warp(), [randoms(1)[0], None])
    assert second[1] is None
    assert second[0] is not None
    assert first[1] is not None
    assert second[0].token_list == first[1].token_list


def test_a_full_row_proposes_its_root_with_one_warning(target: Target) -> None:
    drafter = make(target)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(14, 14)))
    session = drafter.start(target, Chain(3), 2, 6)
    session.observe(commits_of(batch, [6, 3]))
    assert all(t is not None and t.drafted == 3 for t in session.propose(Warp(), randoms(2)))
    session.observe([commits_of(batch, [8], start=6)[0], None])
    with pytest.warns(UserWarning, match="outgrew the drafter's context of 6 tokens"):
        full, fine = session.propose(Warp(), randoms(2))
    assert full is not None
    assert fine is not None
    assert (full.token_list, fine.drafted) == ([int(batch.ids[0, 8])], 3)
    session.observe([commits_of(batch, [10], start=8)[0], None])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert session.propose(Warp(), randoms(2))[0] is not None
    session.observe([commits_of(batch, [4])[0], None])
    assert [t.drafted for t in session.propose(Warp(), randoms(2)) if t is not None] == [3, 3]


def test_the_start_is_the_targets_own(target: Target) -> None:
    ids = torch.arange(0, 128, 2)
    drafter = EagleDrafter.build({"draft_vocab_size": 64}, target.shape)
    drafter.vocabulary.keep(ids)
    drafter.init_from(target)
    taps = torch.randn(2, 3 * 64)
    assert torch.equal(drafter.parts(target).fuse(taps), taps[:, 128:])
    assert torch.equal(drafter.head.weight, target.head_rows(ids))
    assert torch.equal(drafter.norm.weight, target.norm_state()["weight"])
    state = target.layer_state(7)
    layer = drafter.decoder_layers()[0]
    assert torch.equal(layer.down.weight, state["mlp.down_proj.weight"])
    assert torch.equal(layer.out.weight, state["self_attn.o_proj.weight"])


def test_a_head_of_the_targets_is_neither_trained_nor_stored(
    target: Target, tmp_path: Path
) -> None:
    own, lent = make(target, draft_vocab_size=48), make(target, draft_vocab_size=48, head="target")
    assert lent.ids is not None
    rows = target.head_rows(lent.ids).bfloat16().float()
    own.load_state_dict({**lent.state_dict(), "head.weight": rows})
    batch = batch_of(target, own, torch.tensor(prompts_of(9)))
    theirs, ours = (by_slot(d.predict(batch, target)) for d in (own, lent))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    torch.stack([p.logits(slice(0, 3)).sum() for p in lent.predict(batch, target)]).sum().backward()
    assert all(parameter.grad is not None for parameter in lent.parameters())
    save_drafter(lent, tmp_path / "lent", target)
    assert "head.weight" not in load_file(tmp_path / "lent/model.safetensors")
    outputs = [generate(target, d, prompts_of(7, 3), max_new_tokens=12) for d in (own, lent)]
    assert [(o.ids, o.rounds) for o in outputs[0]] == [(o.ids, o.rounds) for o in outputs[1]]
    with pytest.raises(UserError, match="give the target"):
        read_ours(tmp_path / "lent", None)
    full = read_ours(tmp_path / "lent", target).tensors
    assert torch.equal(full["head.weight"], rows)


def test_two_layers_start_as_the_targets_last_two(target: Target) -> None:
    drafter = EagleDrafter.build({"layers": 2}, target.shape)
    drafter.init_from(target)
    for layer, index in zip(drafter.decoder_layers(), (6, 7), strict=True):
        down = target.layer_state(index)["mlp.down_proj.weight"]
        assert torch.equal(layer.down.weight, down)


def test_every_start_can_be_switched_off(target: Target) -> None:
    switches = {
        "init_layer": "layers.0.down.weight",
        "init_embedding": "layers.0.qkv.weight",
        "init_fusion": "fusion.weight",
        "init_head": "head.weight",
    }
    for switch, name in switches.items():
        torch.manual_seed(0)
        drafter = EagleDrafter.build({switch: "random"}, target.shape)
        before = {n: p.detach().clone() for n, p in drafter.named_parameters()}
        drafter.init_from(target)
        after = dict(drafter.named_parameters())
        columns = slice(0, 64) if switch == "init_embedding" else slice(None)
        assert torch.equal(after[name][:, columns], before[name][:, columns]), switch
        # without the layer there is nothing to copy for the embedding either
        off = {name, "layers.0.qkv.weight"} if switch == "init_layer" else {name}
        for other in set(switches.values()) - off:
            assert not torch.equal(after[other], before[other]), (switch, other)


def test_a_target_of_another_kind_is_served_too() -> None:
    """GPT-2: learned positions, LayerNorm, other names. What does not fit starts at random."""
    target = tiny_target("gpt2", engine="reference", num_hidden_layers=8)
    drafter = make(target, draft_vocab_size=32)
    plain, drafted = (
        generate(target, d, prompts_of(7, 3), max_new_tokens=12) for d in (NoDrafter(), drafter)
    )
    assert [o.ids for o in plain] == [o.ids for o in drafted]


@pytest.mark.parametrize("flag", ["norm_before_residual", "tap_norm", "norm_output"])
def test_every_flag_changes_the_drafter(flag: str, target: Target) -> None:
    plain, flagged = make(target), make(target, **{flag: True})
    flagged.load_state_dict(plain.state_dict(), strict=False)
    batch = batch_of(target, plain, torch.tensor(prompts_of(9)))
    before, after = (by_slot(d.predict(batch, target)) for d in (plain, flagged))
    # norm_output leaves the first step alone: it is what is fed back that changes
    step = 1 if flag == "norm_output" else 0
    assert not torch.allclose(before[step, 2], after[step, 2], atol=1e-3)
    if flag == "norm_output":
        torch.testing.assert_close(before[0, 2], after[0, 2])


def test_tap_norm_makes_the_scale_of_a_tap_irrelevant(target: Target) -> None:
    drafter = make(target, tap_norm=True)
    taps = torch.randn(3, 3 * 64)
    louder = taps * torch.tensor([100.0, 1.0, 0.3]).repeat_interleave(64)
    fuse = drafter.parts(target).fuse
    torch.testing.assert_close(fuse(taps), fuse(louder), atol=1e-4, rtol=1e-4)


def test_options_are_resolved_and_build_the_same_again(target: Target) -> None:
    drafter = make(target, draft_vocab_size=48, layers=2, tap_norm=True)
    options = drafter.options()
    assert options["taps"] == (1, 3, 4)
    assert options["draft_vocab_size"] == 48
    again = EagleDrafter.build(options, target.shape)
    assert again.options() == options
    assert {n: t.shape for n, t in again.state_dict().items()} == {
        n: t.shape for n, t in drafter.state_dict().items()
    }
    assert EagleDrafter.build({"draft_vocab_size": 999}, target.shape).ids is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tap": [1]}, "drafter eagle: unknown key 'tap'; the nearest known key is 'taps'"),
        ({"taps": [4, 1]}, r"taps are \[4, 1\]: .* distinct layers, ascending, from 0 to 7"),
        ({"taps": [1, 1]}, r"taps are \[1, 1\]"),
        ({"taps": [1, 8]}, r"taps are \[1, 8\]"),
        ({"taps": [-1]}, r"taps are \[-1\]"),
        ({"taps": []}, r"taps are \[\]"),
        ({"unroll": 0}, "layers is 1, unroll 0: give 1 or more"),
        ({"layers": "two"}, "drafter eagle: layers = 'two' is not allowed; give a whole number"),
        ({"init_head": "copy"}, "init_head = 'copy' is not allowed; give one of target, random"),
        ({"draft_vocab_size": -1}, "draft_vocab_size is -1"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, object], message: str, target: Target
) -> None:
    with pytest.raises(UserError, match=message):
        EagleDrafter.build(options, target.shape)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6])
def test_a43_shallow_targets_need_named_taps(layers: int) -> None:
    shape = tiny_target(num_hidden_layers=layers).shape
    with pytest.raises(UserError, match=f"7 layers or more, this one has {layers}"):
        EagleDrafter.build({}, shape)
    assert EagleDrafter.build({"taps": [0]}, shape).features.layers == (0,)


def test_a_changed_map_of_ids_is_refused_on_load(target: Target, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    drafter = make(target, draft_vocab_size=32)
    folder = save_drafter(drafter, tmp_path / "d", target)
    tensors = load_file(folder / "model.safetensors")
    tensors["vocabulary.ids"] = tensors["vocabulary.ids"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="ascending, unique"):
        load_drafter(folder, target)


def test_a20_the_map_of_ids_travels_with_the_weights(target: Target, tmp_path: Path) -> None:
    drafter = make(target, draft_vocab_size=32)
    drafter.vocabulary.keep(torch.arange(96, 128))
    again = load_drafter(save_drafter(drafter, tmp_path / "d", target), target)
    prompts = prompts_of(6, 9)
    first, second = (generate(target, d, prompts, max_new_tokens=10) for d in (drafter, again))
    assert [o.accepted for o in first] == [o.accepted for o in second]
    session = again.start(target, Chain(3), 1, 20)
    session.observe(commits_of(batch_of(target, drafter, torch.tensor(prompts_of(8))), [6]))
    tree = session.propose(Warp(), randoms(1))[0]
    assert tree is not None
    assert all(96 <= token < 128 for token in tree.token_list[1:])


@pytest.mark.parametrize(("served", "trained"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a40_target_and_drafter_may_differ_in_dtype(served: str, trained: str) -> None:
    target = tiny_target(num_hidden_layers=8)
    drafter = make(target, draft_vocab_size=64).to(getattr(torch, trained))
    serving = Target(target.model.to(getattr(torch, served)))
    plain, drafted = (
        generate(serving, d, prompts_of(5, 8), max_new_tokens=10) for d in (NoDrafter(), drafter)
    )
    assert [len(o.ids) for o in plain] == [len(o.ids) for o in drafted]
    if served == "float32":
        assert [o.ids for o in plain] == [o.ids for o in drafted]
    batch = batch_of(serving, drafter, torch.tensor(prompts_of(9)))
    for prediction in drafter.predict(batch, serving):
        assert prediction.logits(slice(0, 3)).dtype == getattr(torch, trained)


def test_autocast_stays_close_and_quiet(target: Target) -> None:
    drafter = make(target, qk_norm=True, tap_norm=True, layers=2)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(12)))
    exact = by_slot(drafter.predict(batch, target))
    with torch.autocast("cpu", torch.bfloat16):
        close = by_slot(drafter.predict(batch, target))
    for key, logits in exact.items():
        assert (close[key] - logits).abs().max() < 0.03 * logits.abs().max()


@pytest.fixture(scope="module")
def overfitted(target: Target) -> tuple[EagleDrafter, list[list[int]], list[list[int]]]:
    """A drafter that knows most of two greedy texts, with prompts and texts."""
    prompts = prompts_of(8, 8, seed=2)
    outputs = generate(target, NoDrafter(), prompts, max_new_tokens=40)
    drafter = make(target)
    texts = [prompt + output.ids for prompt, output in zip(prompts, outputs, strict=True)]
    learn(drafter, target, batch_of(target, drafter, torch.tensor(texts)), 20, 3e-3)
    return drafter, prompts, [o.ids for o in outputs]


@pytest.mark.slow
def test_what_is_learned_is_accepted(
    overfitted: tuple[EagleDrafter, list[list[int]], list[list[int]]], target: Target
) -> None:
    drafter, prompts, texts = overfitted
    for growth, least in ((Chain(3), 2.5), (Dynamic(8, 3, 3), 2.6)):
        check_accepted(target, drafter, prompts, texts, growth, least)


@pytest.mark.parametrize("gamma", [1, 3])
def test_acceptance_is_teacher_forced_agreement(
    gamma: int,
    overfitted: tuple[EagleDrafter, list[list[int]], list[list[int]]],
    target: Target,
) -> None:
    """Round by round: the accepted length is the run of agreements at the root's slot."""
    drafter, prompts, texts = overfitted
    outputs = generate(target, drafter, prompts, growth=Chain(gamma), max_new_tokens=40)
    assert any(a > 0 for o in outputs for a in o.accepted)
    assert any(a < gamma for o in outputs for a in o.accepted)
    for prompt, text, output in zip(prompts, texts, outputs, strict=True):
        ids = torch.tensor([prompt + text])
        trained = by_slot(drafter.predict(batch_of(target, drafter, ids), target))
        root = len(prompt)
        for accepted in output.accepted:
            run = 0
            depth = min(gamma, ids.shape[1] - root - 2)  # what may still be emitted, less the bonus
            while run < depth and int(trained[run, root - 1].argmax()) == ids[0, root + 1 + run]:
                run += 1
            assert accepted == run
            root += accepted + 1


def test_a41_heads_need_not_fill_the_hidden_width(tmp_path: Path) -> None:
    target = tiny_target("qwen3", num_hidden_layers=8, head_dim=32, hidden_size=64)
    drafter = make(target, qk_norm=True, draft_vocab_size=0)
    before = drafter.head.weight.detach().clone()
    learn(drafter, target, batch_of(target, drafter, torch.tensor(prompts_of(12))), 2, 3e-3)
    assert not torch.equal(before, drafter.head.weight)
    again = load_drafter(save_drafter(drafter, tmp_path / "d", target), target)
    plain, drafted = (
        generate(target, d, prompts_of(5), max_new_tokens=10) for d in (NoDrafter(), again)
    )
    assert plain[0].ids == drafted[0].ids


def test_the_defaults_are_documented() -> None:
    """Every option has a line in the docstring."""
    text = EagleOptions.__doc__ or ""
    assert all(f"{name}:" in text for name in EagleOptions.__dataclass_fields__)

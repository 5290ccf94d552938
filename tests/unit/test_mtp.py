"""Multi-token prediction: both forms train on exactly what they read while decoding."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache  # noqa: TID251 - an independent reference
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from drafters.base import Batch, Commit
from drafters.depths import depth_weights
from drafters.errors import UserError
from drafters.growth import Chain, Dynamic, Static
from drafters.methods.mtp import MtpDrafter, MtpOptions
from drafters.methods.none import NoDrafter
from drafters.sampling import Warp
from drafters.settings import find_config, load
from drafters.target import Target
from drafters.teacher import Teacher
from drafters.tree import TokenTree
from inference import generate
from inference.served.comparison import decode
from tests.forced import Forced, by_slot
from tests.neural import (
    away,
    batch_of,
    check_accepted,
    check_every_label_is_predicted_once,
    learn,
    randoms,
)
from tests.tiny import prompts_of, tiny_model, tiny_target
from training.options import TrainSettings

UNROLL = 4
FORMS: dict[str, dict[str, object]] = {
    "reused": {"modules": 1},
    "one_a_depth": {"modules": 4},
    "last_goes_on": {"modules": 2},
    "normed": {"modules": 3, "norm_output": True},
    "reduced_qwen": {
        "modules": 3,
        "draft_vocab_size": 48,
        "qk_norm": True,
        "attention_bias": True,
    },
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=2, initializer_range=0.2)


def make(target: Target, **options: object) -> MtpDrafter:
    """Build a drafter away from every special starting point."""
    return away(MtpDrafter, target, 0.1, **{"unroll": UNROLL, **options})


def commit(batch: Batch, row: int, start: int, stop: int) -> Commit:
    """Commit tokens start..stop-1 of a row, as a prefill or as one round's accepted path."""
    inputs, last = batch.ids[row, start:stop], batch.last[row, start:stop]
    tree = TokenTree.chain(inputs) if start else None
    return Commit(inputs, int(batch.ids[row, stop]), last=last, tree=tree)


def decoded(
    drafter: MtpDrafter, target: Target, batch: Batch, lengths: Sequence[int], depths: int
) -> list[Tensor]:
    """Return each depth's logits [R, K] after rows of these lengths, which came in two commits."""
    forced = [batch.ids[row, n + 1 : n + depths].tolist() for row, n in enumerate(lengths)]
    growth, rows = Forced(forced), len(lengths)
    growth.depth = depths  # levels of guesses, the last of which is not fed
    session = drafter.start(target, growth, rows, 30)
    first = [min(n, 3) for n in lengths]
    session.observe([commit(batch, row, 0, n) for row, n in enumerate(first)])
    session.propose(Warp(), randoms(rows))
    session.observe(
        [
            commit(batch, row, first[row], n) if n > first[row] else None
            for row, n in enumerate(lengths)
        ]
    )
    session.propose(Warp(), randoms(rows))
    return growth.logits


@pytest.mark.parametrize("name", FORMS)
def test_training_steps_equal_decoding_steps(name: str) -> None:
    """Step j at slot t is what depth j + 1 of a session gives that has true states up to t.

    Rows of unequal length, one shorter than there are modules, with guesses made and gone between
    two commits. In double precision, so that nothing hides in rounding.
    """
    target = Target(tiny_model(num_hidden_layers=2, initializer_range=0.2).double())
    drafter = make(target, **FORMS[name]).double()
    batch = batch_of(target, drafter, torch.tensor(prompts_of(18, 18, 18)))
    trained = by_slot(drafter.predict(batch, target))
    lengths = [5, 1, 13]
    found = decoded(drafter, target, batch, lengths, UNROLL)
    assert len(found) == UNROLL
    for step, logits in enumerate(found):
        for row, length in enumerate(lengths):
            expected = trained[step, row * 18 + length - 1]
            torch.testing.assert_close(logits[row], expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["reused", "one_a_depth", "last_goes_on"])
def test_a_step_reads_the_token_it_follows_and_none_later(name: str, target: Target) -> None:
    """Step s at slot t uses the embedding of token t + s + 1, its label is token t + s + 2."""
    drafter = make(target, **FORMS[name])
    batch = batch_of(target, drafter, torch.tensor(prompts_of(14)))
    before = by_slot(drafter.predict(batch, target))
    cut = 8
    changed = batch.ids.clone()
    changed[0, cut:] = (changed[0, cut:] + 1) % 128
    after = by_slot(drafter.predict(replace(batch, ids=changed), target))  # states as they were
    assert {step for step, _ in before} == set(range(UNROLL))
    for (step, slot), logits in before.items():
        assert slot + step + 2 < 14
        same = torch.allclose(logits, after[step, slot], atol=1e-5)
        assert same == (slot + 1 + step < cut), (step, slot)


def test_predictions_cover_every_supervised_label_once(target: Target) -> None:
    check_every_label_is_predicted_once(target, make(target, modules=2))


@pytest.mark.parametrize("modules", [1, 3])
def test_the_halves_of_the_projection_are_alike(modules: int, target: Target) -> None:
    """Swapping what it reads together with its columns leaves outputs equal."""
    drafter = make(target, modules=modules)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(9)))
    before = by_slot(drafter.predict(batch, target))
    parts = drafter.parts(target)
    for step, own in zip(drafter.continuations(), parts.modules, strict=True):
        weight = torch.cat(step.project.weight.detach().chunk(2, -1)[::-1], -1)

        def project(joined: Tensor, weight: Tensor = weight) -> Tensor:
            return torch.cat(joined.chunk(2, -1)[::-1], -1) @ weight.T

        object.__setattr__(own, "project", project)
    drafter.parts = lambda _: parts
    after = by_slot(drafter.predict(batch, target))
    for key, logits in before.items():
        torch.testing.assert_close(after[key], logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("modules", [1, 3])
def test_gradients_flow_through_all_steps_and_never_into_the_target(
    modules: int, target: Target
) -> None:
    """The last step alone reaches the first module's projection."""
    drafter = make(target, modules=modules, draft_vocab_size=48)
    batch = batch_of(target, drafter, torch.tensor(prompts_of(10)))
    last = drafter.predict(batch, target)[-1]
    last.logits(slice(0, len(last.group))).square().mean().backward()
    reached = {n for n, p in drafter.named_parameters() if p.grad is not None and p.grad.any()}
    assert "steps.0.project.weight" in reached
    assert f"steps.{modules - 1}.norm.weight" in reached
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())


def test_one_head_serves_training_and_decoding(target: Target) -> None:
    """A gradient's way through the frozen head gives the same logits, on all ids and on some."""
    state = torch.randn(3, 64)
    for ids in (None, torch.tensor([3, 5, 99])):
        plain, taught = target.head(state, ids), target.head(state.clone().requires_grad_(), ids)
        assert taught.requires_grad
        torch.testing.assert_close(taught.detach(), plain, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("modules", [1, 3])
def test_what_is_learned_is_accepted(modules: int, target: Target) -> None:
    """An overfitted drafter's chains and trees are taken, one level beyond the trained too."""
    prompts = prompts_of(8, 8, seed=2)
    plain = generate(target, NoDrafter(), prompts, max_new_tokens=40)
    ids = torch.tensor([p + o.ids for p, o in zip(prompts, plain, strict=True)])
    drafter = make(target, modules=modules, unroll=3)
    losses = learn(drafter, target, batch_of(target, drafter, ids), 40, 3e-3)
    assert losses[-1] < 0.05 * losses[0]
    for growth, least in ((Chain(3), 3.0), (Chain(4), 3.0), (Dynamic(8, 3, 3), 3.0)):
        check_accepted(target, drafter, prompts, [o.ids for o in plain], growth, least)


@pytest.mark.slow
@pytest.mark.parametrize("growth", [Chain(2), Chain(6), Static((2, 1, 2, 1, 2))], ids=str)
@pytest.mark.parametrize("modules", [1, 3])
def test_any_growth_is_served_losslessly(
    modules: int, growth: Chain | Static, target: Target
) -> None:
    """Shallower than the modules, and deeper than all that was trained; rows come and go."""
    prompts = prompts_of(7, 1, 2, 12)
    plain, drafted = (
        generate(target, d, prompts, growth=growth, max_new_tokens=12, rows=3)
        for d in (NoDrafter(), make(target, modules=modules))
    )
    assert [o.ids for o in plain] == [o.ids for o in drafted]


def reference(
    modules: int, distance: float, **sizes: object
) -> tuple[PreTrainedModel, MtpModel, MtpDrafter]:
    """Return a target, transformers' own multi-token model of it, and ours with its weights."""
    model = tiny_model("qwen3", **sizes)
    model.config.num_mtp_layers = modules
    model.config.mtp_layer_types = ["full_attention"] * modules
    theirs = MtpModel(model, modules).eval()
    options = {"norm_output": True, "qk_norm": True, "draft_vocab_size": 0}
    ours = away(MtpDrafter, Target(model), distance, modules=modules, unroll=UNROLL, **options)
    names = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj"}
    names["norm"] = "post_norm"
    with torch.no_grad():
        for step, layer in zip(ours.continuations(), theirs.layers, strict=True):
            state = dict(layer.named_parameters())
            for name, place in step.places().items():
                around = names.get(name.removesuffix(".weight"))
                key = f"mtp_block.{name}" if around is None else f"{around}.weight"
                state.pop(key).copy_(place)
            assert not state
    return model, theirs, ours


@pytest.mark.parametrize("modules", [1, 3])
def test_transformers_own_implementation_drafts_the_same(modules: int) -> None:
    """An independent reference: its logits of every depth on its own drafts equal ours."""
    model, theirs, ours = reference(modules, 0.2, num_hidden_layers=2, initializer_range=0.2)
    target, ids = Target(model), torch.tensor(prompts_of(11))
    batch = batch_of(target, ours, torch.cat((ids, torch.zeros(1, 4, dtype=torch.int64)), 1))
    drafts, logits, _ = theirs(
        input_ids=ids[:, 1:],
        last_hidden_states=batch.last[:, :10],
        attention_mask=torch.ones_like(ids[:, 1:]),
        position_ids=torch.arange(1, 11)[None],
        mtp_cache=MtpCache(config=target.config.get_mtp_config()),
    )
    batch.ids[0, 11 : 11 + modules] = drafts[0]
    found = decoded(ours, target, batch, [10], modules)
    assert len(found) == modules
    for depth, own in enumerate(found):
        torch.testing.assert_close(own[0], logits[0, depth], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("modules", [1, 3])
def test_transformers_own_generator_drafts_the_same(
    modules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round by round, rejected guesses among them; only the loading of weights is left out."""
    model, theirs, ours = reference(modules, 0.01, num_hidden_layers=4, initializer_range=0.1)
    rounds: list[tuple[int, list[int], int]] = []
    own = MTPCandidateGenerator.get_candidates

    def keep(
        generator: MTPCandidateGenerator, input_ids: Tensor, *given: Any, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        found = own(generator, input_ids, *given, **named)  # type: ignore[arg-type]
        length = input_ids.shape[1]
        rounds.append((length - 11, found[0][0, length:].tolist(), int(named["n_last_matches"])))
        return found

    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *_, **__: theirs)
    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", keep)
    prompts = prompts_of(11)
    asked = {"use_mtp": True, "max_new_tokens": 40, "do_sample": False}
    ids = model.generate(torch.tensor(prompts), **asked)[0, 11:].tolist()  # type: ignore[operator]
    decoded = decode(Target(model), ours, prompts, modules, 40)
    assert decoded.outputs[0].ids == ids
    assert len({accepted for _, _, accepted in rounds}) > 1
    first, *later = rounds  # its prefill drafts nothing
    assert first[:2] == (0, [])
    assert decoded.drafts[0].keys() == {place for place, _, _ in later}
    for place, drafted, _ in later:
        ahead = decoded.drafts[0][place]  # shorter before the output's end
        assert drafted[: len(ahead)] == ahead, place


def test_depth_weights_are_fastmtp_s() -> None:
    """Normalised powers of 0.6: 25/49, 15/49, 9/49, from the configuration that is shipped."""
    given = ["target=t", "output=o", "data.path=d"]
    settings = load(TrainSettings, [find_config("drafters/fastmtp.yaml")], given)
    assert settings.drafter["modules"] == 1
    assert settings.drafter["unroll"] == 3
    one = torch.zeros(1, dtype=torch.int64)
    depths = [SimpleNamespace(depth=d, positions=one) for d in (1, 2, 3)]
    batch, teacher = SimpleNamespace(ids=one), SimpleNamespace(spec=Teacher)
    weights = depth_weights(depths, batch, teacher, settings.loss)  # type: ignore[arg-type]
    expected = torch.tensor([25 / 49, 15 / 49, 9 / 49])
    torch.testing.assert_close(torch.cat(weights), expected)


def test_the_start_reads_embedding_and_state_alike(target: Target) -> None:
    drafter = MtpDrafter.build({"modules": 2, "unroll": 2}, target.shape)
    drafter.init_from(target)
    state = target.layer_state(1)
    for step in drafter.continuations():
        assert torch.equal(step.project.weight, torch.eye(64).repeat(1, 2))
        assert torch.equal(step.layer.down.weight, state["mlp.down_proj.weight"])
        assert torch.equal(step.norm.weight, target.norm_state()["weight"])
    names = set(drafter.state_dict())
    assert not any("embed" in name.split(".")[-2] and "norm" not in name for name in names)
    assert not any("head" in name for name in names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": 1}, "drafter mtp: unknown key 'module'; the nearest known key is 'modules'"),
        ({"modules": 0}, "modules is 0, unroll 4: give 1 or more modules"),
        ({"modules": 5}, "modules is 5, unroll 4: give .* an unroll of at least as many"),
        ({"init": "own"}, "init = 'own' is not allowed; give one of target, shipped, random"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, object], message: str, target: Target
) -> None:
    with pytest.raises(UserError, match=message):
        make(target, **options)


def test_the_defaults_are_documented() -> None:
    """Every option has a line in the docstring."""
    text = MtpOptions.__doc__ or ""
    assert all(f"{name}:" in text for name in MtpOptions.__dataclass_fields__)

"""Every link of the chain is broken in turn; the doctor must name it, and none where all hold.

A tiny drafter is overfitted to the texts it is examined on, so it agrees nearly always when the
chain holds: the gap between training and serving is then the break's alone.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import drafters.unrolled
from drafters.base import Batch, Commit, Features, NeuralDrafter
from drafters.checkpoint import save_drafter
from drafters.errors import UserError
from drafters.fingerprint import template_digest
from drafters.formats.id_tables import id_tables
from drafters.growth import Chain
from drafters.registry import build_drafter
from drafters.session import CachedSession, Final
from drafters.stored import CONFIG, WEIGHTS
from drafters.target import Target
from drafters.vocab import DraftVocabulary
from inference import modes
from inference.doctor import LINKS, Diagnosis, Patient, examine, patient_of
from inference.doctor.readings import (
    Reading,
    Score,
    States,
    best,
    chance,
    doubt,
    others,
    scores,
    stated,
)
from inference.doctor.serving import served
from inference.doctor.stored import template
from inference.generate import generate
from inference.prompts import chat_ids
from inference.served import Engine, Job, Served
from inference.verify import Verdict
from tests.folders import VOCAB_SIZE, tiny_tokenizer
from tests.tiny import prompts_of, tiny_model, tiny_target
from tests.unit.test_every_drafter import NAMES, NEURAL, SIZES, make

pytestmark = pytest.mark.slow

TAPS = (1, 3, 7)
ASSISTANT = "{{ '<|im_start|>assistant\n' }}"
THINK = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
QUESTIONS = ["the band", "an anthem", "in the sand", "hands", "thin and then", "x = 1"]


@pytest.fixture(scope="module")
def target() -> Target:
    sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 8, "hidden_size": 32}
    model = tiny_model(**sizes, intermediate_size=64)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = str(tokenizer.chat_template).replace(ASSISTANT, ASSISTANT + THINK)
    return Target(model, tokenizer, name="tiny")


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    return [chat_ids(target, [{"role": "user", "content": text}]) for text in QUESTIONS]


def lesson(patient: Patient, reading: Reading) -> tuple[Batch, Tensor]:
    """Return all texts as a reading has them, and the label of every flat position."""
    batches, labels = [], []
    longest = max(len(text.ids) for text in patient.texts)
    for text in patient.texts:
        batch = States(patient, text, [reading]).read(reading)
        short = longest - len(text.ids)
        row = torch.roll(text.ids, -1 - reading.labels)
        labels.append(F.pad(row, (0, short)))
        assert batch.taps is not None
        batches.append(
            Batch(
                F.pad(batch.ids, (0, short)),
                F.pad(batch.label_mask, (0, short)),
                F.pad(batch.document, (0, short), value=-1),
                F.pad(batch.position, (0, short)),
                F.pad(batch.taps, (0, 0, 0, short)),
                F.pad(batch.last, (0, 0, 0, short)),
            )
        )
    joined = [torch.cat([getattr(b, f.name) for b in batches]) for f in fields(Batch)]
    return Batch(*joined), torch.cat(labels)


def trained(
    target: Target, prompts: list[list[int]], reading: Reading | None = None, steps: int = 50
) -> NeuralDrafter:
    """Overfit a drafter to the target's greedy answers under a reading of them."""
    torch.manual_seed(0)
    options = {"taps": list(TAPS), "unroll": 2, "draft_vocab_size": 200}
    drafter = build_drafter("eagle", options, target.shape)
    assert isinstance(drafter, NeuralDrafter)
    teacher = Patient(target, prompts, build_drafter("none", {}, target.shape), new_tokens=24)
    seen = torch.cat([text.ids for text in teacher.texts]).unique()
    unseen = torch.tensor(sorted(set(range(VOCAB_SIZE)) - set(seen.tolist())))
    for module in drafter.modules():
        if isinstance(module, DraftVocabulary):
            module.keep(torch.cat((seen, unseen[: 200 - len(seen)])).sort().values)
    drafter.init_from(target)
    batch, labels = lesson(teacher, reading or stated(drafter.features))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3)
    assert drafter.ids is not None
    for _ in range(steps):
        losses = []
        for p in drafter.predict(batch, target):
            index = torch.searchsorted(drafter.ids, labels[p.positions]).clamp_max(199)
            losses.append(F.cross_entropy(p.logits(slice(0, len(p.positions))), index))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return drafter.eval()


@pytest.fixture(scope="module")
def drafter(target: Target, prompts: list[list[int]]) -> NeuralDrafter:
    return trained(target, prompts)


def record(target: Target) -> dict[str, Any]:
    return {
        "data": {"template_options": {}},
        "chat_template": template_digest(target.tokenizer),
        "target_dtype": "float32",
        "optim": {"lr_scale": {}},
        "metrics": {"agreement/1": 0.9},
    }


@pytest.fixture
def folder(drafter: NeuralDrafter, target: Target, tmp_path: Path) -> Path:
    return save_drafter(drafter, tmp_path / "drafter", target, record(target))


def diagnosis(
    target: Target, drafter: Path | NeuralDrafter, prompts: list[list[int]], **more: Any
) -> Diagnosis:
    found = examine(patient_of(target, drafter, prompts, new_tokens=24, **more))
    assert sorted(f.link for f in found.findings) == sorted(LINKS)
    json.dumps(found.to_dict())
    return found


def named(found: Diagnosis, link: str, said: str) -> None:
    assert found.broken is not None, found
    assert found.broken.link == link, found.broken
    assert said in found.broken.said, found.broken
    assert found.broken.fix


def test_a_chain_that_holds_is_healthy(
    target: Target, folder: Path, prompts: list[list[int]]
) -> None:
    """And the three measures of acceptance are one: same text, same positions."""
    found = diagnosis(target, folder, prompts)
    assert found.broken is None, found.broken
    assert {f.status for f in found.findings[:-2]} == {"ok"}
    assert {f.said for f in found.findings[-2:]} == {"no engine was named (--engine)"}
    assert tuple(f.link for f in found.findings) == LINKS
    figures = next(f.figures for f in found.findings if f.link == "decoding")
    assert figures["different"] == 0
    assert figures["teacher_forced_agreement"] == figures["step_0_acceptance"] > 0.8
    assert figures["simulated_tau"] == figures["tau"] > 2


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / WEIGHTS)


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / CONFIG).read_text())
    edit(config)
    (folder / CONFIG).write_text(json.dumps(config))


def nan(tensors: dict[str, Tensor]) -> None:
    tensors["head.weight"][3, 3] = torch.nan


def untuned(tensors: dict[str, Tensor], target: Target) -> None:
    tensors["head.weight"] = target.head_rows(tensors["vocabulary.ids"])


STORED: dict[str, tuple[Callable[[dict[str, Tensor], Target], object], str, str]] = {
    "missing": (lambda t, _: t.pop("norm.weight"), "tensors", "missing tensors ['norm.weight']"),
    "unused": (lambda t, _: t.update(x=torch.ones(1)), "tensors", "unused tensors ['x']"),
    "nan": (lambda t, _: nan(t), "tensors", "not finite in head.weight"),
    "tied": (untuned, "tensors", "head.weight equals the target's own head"),
    "tied whole": (
        lambda t, target: t.update({"head.weight": target.head_rows(torch.arange(VOCAB_SIZE))}),
        "tensors",
        "head.weight is (265, 32), the config asks for (200, 32)",
    ),
    "ids zeroed": (lambda t, _: t["vocabulary.ids"].zero_(), "vocabulary", "ascending"),
    "ids never set": (
        lambda t, _: t["vocabulary.ids"].copy_(torch.arange(200)),
        "vocabulary",
        "never filled",
    ),
    "offsets for ids": (
        lambda t, _: t["vocabulary.ids"].sub_(torch.arange(200)),
        "vocabulary",
        "ascending",
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_broken_files_are_named(
    name: str, target: Target, folder: Path, prompts: list[list[int]]
) -> None:
    change, link, said = STORED[name]
    edit_tensors(folder, lambda tensors: change(tensors, target))
    named(diagnosis(target, folder, prompts), link, said)


def test_another_target_is_named(folder: Path, prompts: list[list[int]]) -> None:
    sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 8, "hidden_size": 32}
    other = Target(tiny_model(seed=1, **sizes, intermediate_size=64), tiny_tokenizer())
    named(diagnosis(other, folder, prompts), "template", "text is another")
    edit_config(folder, lambda config: config["training"].pop("chat_template"))
    named(diagnosis(other, folder, prompts), "fingerprint", "whose tokenizer is")


def test_another_rendering_is_named(target: Target, folder: Path, prompts: list[list[int]]) -> None:
    options = {"enable_thinking": False}
    edit_config(folder, lambda c: c["training"]["data"].update(template_options=options))
    named(diagnosis(target, folder, prompts), "template", "{'enable_thinking': False}")
    rendered = patient_of(target, folder, prompts, template_options=options)
    assert template(rendered).status == "ok"
    # an option that the template does not look at changes nothing
    edit_config(folder, lambda c: c["training"]["data"].update(template_options={"x": 1}))
    assert template(patient_of(target, folder, prompts)).status == "ok"


def test_a_better_reading_that_is_not_believed_is_explained() -> None:
    start = Score(Reading("as stated", ""), (-2.0,) * 3, (0.2,) * 3)
    told = replace(start, reading=Reading("labels one earlier", "shift", holds_answer=True))
    worse, copied = replace(told, agreement=(0.1,) * 3), replace(told, agreement=(0.4,) * 3)
    chanced = replace(copied, reading=Reading("labels one later", "shift"))
    for other, wanted in (
        (copied, "one trained so would agree at 0.8 or more)"),
        (chanced, "measured; give more prompts)"),
    ):
        assert doubt(start, other).endswith(wanted)
    assert doubt(start, worse) == ""


def test_wrong_numbering_of_taps_is_named(
    target: Target, drafter: NeuralDrafter, prompts: list[list[int]]
) -> None:
    """Weights trained on layers 1, 3, 7 under the numbers before them."""
    made = copy.deepcopy(drafter)
    made.features = Features((0, 2, 6))
    found = diagnosis(target, made, prompts)
    named(found, "taps", "every tap one later")
    assert found.broken is not None
    assert "[1, 3, 7]" in found.broken.said


@pytest.mark.slow
def test_numbering_that_is_one_too_high_is_named(target: Target, prompts: list[list[int]]) -> None:
    made = trained(target, prompts, Reading("", "", (1, 3, 6)))
    made.features = Features((2, 4, 7))
    named(diagnosis(target, made, prompts), "taps", "[1, 3, 6]")


@pytest.mark.slow
def test_a_tap_trained_after_the_norm_is_named(target: Target, prompts: list[list[int]]) -> None:
    """hidden_states[-1] is what a trainer reads by mistake for the last layer's output."""
    made = trained(target, prompts, Reading("post-norm", "", (1, 3, 8)))
    named(diagnosis(target, made, prompts), "taps", "the highest tap post-norm")


@pytest.mark.slow
def test_a_tap_served_after_the_norm_is_named(
    target: Target, folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, taught = Target.forward, Target.forward_batch

    def normed(self: Target, *given: Any) -> Any:
        logits, taps, last = forward(self, *given)
        width = last.shape[-1]
        return logits, None if taps is None else torch.cat((taps[:, :-width], last), -1), last

    def normed_batch(self: Target, *given: Any) -> Any:
        taps, last = taught(self, *given)
        width = last.shape[-1]
        return None if taps is None else torch.cat((taps[..., :-width], last), -1), last

    monkeypatch.setattr(Target, "forward", normed)
    named(diagnosis(target, folder, prompts), "features", "differ from training's")
    monkeypatch.setattr(Target, "forward_batch", normed_batch)
    named(diagnosis(target, folder, prompts), "features", "layer 7 is read after the final norm")


@pytest.mark.slow
def test_tokens_paired_with_the_wrong_features_are_named(
    target: Target, folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session leaves tokens unshifted: each stands beside its own feature."""

    def unshifted(self: object, commit: Commit) -> Final:
        return Final(commit.inputs, commit.taps)

    monkeypatch.setattr("drafters.recurrent.RecurrentSession.final", unshifted)
    named(diagnosis(target, folder, prompts), "shift", "tokens one earlier")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reading", "said"),
    [
        (Reading("", "", TAPS, tokens=-1), "tokens one earlier"),
        (Reading("", "", TAPS, labels=1), "labels one later"),
        (Reading("", "", TAPS, labels=-1), "labels one earlier"),
    ],
    ids=str,
)
def test_weights_trained_with_a_shift_are_named(
    reading: Reading, said: str, target: Target, prompts: list[list[int]]
) -> None:
    named(diagnosis(target, trained(target, prompts, reading), prompts), "shift", said)


@pytest.mark.slow
def test_a_leaking_mask_is_named(
    target: Target, folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaking(query: Tensor, keys: Tensor, values: Tensor, dim: int) -> Tensor:
        given = (x.transpose(1, 2) for x in (query, keys, values))
        out = F.scaled_dot_product_attention(*given, scale=dim**-0.5, enable_gqa=True)
        return out.transpose(1, 2)

    monkeypatch.setattr(drafters.unrolled, "_causal", leaking)
    named(diagnosis(target, folder, prompts), "mask", "which decoding does not have yet")


@pytest.mark.slow
def test_texts_that_see_their_neighbours_are_named(
    target: Target, folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = drafters.unrolled.Documents
    monkeypatch.setattr(
        "drafters.unrolled.Documents", lambda document: documents(document.clamp(-1, 0))
    )
    named(diagnosis(target, folder, prompts), "mask", "text before it in the same row")


def test_a_stale_cache_is_named(
    target: Target, folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session never encodes what was accepted."""
    observe = CachedSession.observe

    def forgetful(self: CachedSession, commits: list[Commit | None]) -> None:
        observe(self, commits)
        for row, commit in enumerate(commits):
            if commit is not None and commit.tree is not None:
                self._waiting[row].clear()

    monkeypatch.setattr(CachedSession, "observe", forgetful)
    named(diagnosis(target, folder, prompts), "cache", "goes on from its own guesses")


@pytest.mark.slow
def test_ids_of_another_text_are_named(
    target: Target, folder: Path, prompts: list[list[int]], drafter: NeuralDrafter
) -> None:
    """Ascending and unique, but not those it was trained on: it claims .9 and can say far less."""
    texts = patient_of(target, folder, prompts, new_tokens=24)
    texts.load()
    said = {token for text in texts.texts for token in text.output.ids}
    rest = [token for token in range(VOCAB_SIZE) if token not in said]
    kept = torch.tensor(sorted([*rest, *sorted(said)][:200]))
    edit_tensors(folder, lambda tensors: tensors["vocabulary.ids"].copy_(kept))
    found = diagnosis(target, folder, prompts)
    named(found, "coverage", "in training it agreed on 90.0%")


@pytest.mark.slow
def test_a_lossy_engine_is_named(
    target: Target, folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(laws: Any, tree: Any, coin: Any) -> Verdict:
        path = list(range(len(tree)))
        return Verdict(path, coin.draw(laws.law(path[-1])))

    monkeypatch.setitem(modes.VERIFIERS, "lossless", careless)
    named(diagnosis(target, folder, prompts), "losslessness", "differs from plain decoding's")


class FakeEngine(Engine):
    """Accepts a share of what is accepted here."""

    share = 1.0
    refusal = ""

    def __post_init__(self) -> None:
        """Nothing is built."""

    def run(self, job: Job) -> Served:
        """Decode with this library."""
        if job.drafter is not None and self.refusal:
            raise UserError(self.refusal)
        target, drafter = self.kin  # type: ignore[attr-defined]
        outputs = generate(
            target, drafter, job.prompts, growth=Chain(job.gamma or 1), max_new_tokens=24
        )
        accepted = int(self.share * sum(sum(o.accepted) for o in outputs))
        rounds = sum(o.rounds for o in outputs)
        return Served("fake 1", [o.ids for o in outputs], 1.0, rounds, 4 * rounds, accepted)


def test_a_drafter_that_an_engine_serves_well_is_healthy(
    target: Target,
    folder: Path,
    prompts: list[list[int]],
    drafter: NeuralDrafter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And one that the engine reads otherwise, refuses or gets a damaged file of is not."""
    monkeypatch.setattr(Target, "folder", folder)  # of a target that was never saved
    monkeypatch.setattr(FakeEngine, "kin", (target, drafter), raising=False)
    engine = FakeEngine("vllm", folder)
    patient = patient_of(target, folder, prompts, new_tokens=24, engine=engine)
    assert [f.link for f in examine(patient).findings] == list(LINKS)
    exported, accepted = served(patient)
    assert (exported.status, accepted.status) == ("ok", "ok"), (exported, accepted)
    assert "tensors come back bit for bit" in exported.said
    monkeypatch.setattr(FakeEngine, "share", 0.3)
    found = examine(patient)
    named(found, "engine", "are accepted here on the same prompts")
    monkeypatch.setattr(FakeEngine, "refusal", "vLLM refused eagle3: KeyError: fc")
    named(examine(patient), "engine", "KeyError: fc")
    zeroed = id_tables(torch.arange(200), VOCAB_SIZE)
    monkeypatch.setattr("drafters.formats.eagle3_flat.id_tables", lambda *_: zeroed)
    named(examine(patient), "export", "vocabulary.ids differ")
    llama = patient_of(target, folder, prompts, new_tokens=24, engine=FakeEngine("x", folder))
    llama.load()
    assert {f.said for f in served(llama)} == {"x serves no eagle drafters of ours"}


@pytest.mark.slow
def test_another_dtype_is_noted(target: Target, folder: Path, prompts: list[list[int]]) -> None:
    edit_config(folder, lambda config: config["training"].update(target_dtype="bfloat16"))
    found = diagnosis(target, folder, prompts)
    assert found.broken is None
    assert {f.link for f in found.findings if f.status == "note"} == {"dtype"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_family_can_be_examined(name: str) -> None:
    """Random weights fit no reading, but the session must guess what training predicts."""
    target = tiny_target(**SIZES)
    prompts = prompts_of(9, 12, 7, 15)
    drafter = make(name, target)
    for module in drafter.modules() if isinstance(drafter, NeuralDrafter) else ():
        if isinstance(module, DraftVocabulary) and module.size:
            module.keep(torch.arange(module.size) * 2)
    found = examine(patient_of(target, drafter, prompts, new_tokens=12))
    assert found.broken is None, found.broken
    by_link = {finding.link: finding for finding in found.findings}
    assert by_link["losslessness"].status == "ok"
    if name in NEURAL:
        assert by_link["mask"].status == "ok"
        assert by_link["decoding"].figures["compared"] > 0


@pytest.mark.slow
def test_drafters_without_weights_are_examined_too(
    target: Target, prompts: list[list[int]]
) -> None:
    found = diagnosis(target, Path("ngram"), prompts)
    assert found.broken is None
    done = {f.link for f in found.findings if f.status == "ok"}
    assert {"decoding", "losslessness"} <= done


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 5, 20])
@pytest.mark.parametrize("started", ["target", "random"])
def test_a_drafter_that_learned_little_is_blamed_for_nothing(
    steps: int, started: str, target: Target, prompts: list[list[int]]
) -> None:
    """Fresh from the target's own weights it still reads features as the target's head does."""
    drafter = trained(target, prompts, steps=steps)
    if started == "random":
        torch.manual_seed(steps)
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    other = prompts_of(9, 12, 7, 15, 11, 8, vocab_size=VOCAB_SIZE, seed=3)
    patient = patient_of(target, drafter, other, new_tokens=16)
    readings = [stated(drafter.features), *others(drafter.features, 8)]
    assert best(scores(patient, readings)) is None


def test_a_win_must_be_beyond_chance() -> None:
    reading = Reading("", "")
    start = Score(reading, (-2.0, -3.0, -1.0), (0.4, 0.2, 0.5))
    clear = Score(reading, (-1.0, -2.1, 0.1), (0.6, 0.5, 0.9))
    lucky = Score(reading, (-1.0, -3.1, -0.9), (0.6, 0.5, 0.9))
    assert chance(start, start) == 1.0
    assert chance(start, clear) < 0.003 < 0.2 < chance(start, lucky)
    assert best([start, lucky]) is None
    assert best([start, clear]) == (clear, chance(start, clear))
    # a drafter that learned little, or less than the reading shows, was not trained on it
    assert best([start, clear], recorded=0.05) is None
    assert best([start, clear], recorded=0.2) is None
    assert best([start, clear], recorded=0.6) is not None
    # what holds the answer is read right nearly always by one that was trained to
    telling = replace(reading, holds_answer=True)
    half = replace(clear, reading=telling)
    assert best([start, half]) is None
    assert best([start, half, clear]) is not None
    assert best([start, replace(half, agreement=(0.9, 0.8, 1.0))]) is not None
    # the more readings are tried, the less one win says
    assert best([start, clear, *[lucky] * 9]) is None


def test_the_readings_of_a_shallow_or_top_tap() -> None:
    names = [reading.name for reading in others(Features((0, 7)), 8) if reading.link == "taps"]
    assert names == ["every tap one later", "the highest tap post-norm", "taps in descending order"]
    names = [reading.name for reading in others(Features(last=True), 8)]
    assert names[0] == "the last state before its norm"
    assert {reading.link for reading in others(Features(), 8)} == {"shift"}

"""The last links: the export that an engine reads, and what the engine accepts of its drafts."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from drafters.errors import UserError
from drafters.formats.convert import export_drafter, import_drafter, read_ours
from drafters.formats.foreign import Foreign
from drafters.formats.registry import claiming
from drafters.formats.served import SERVED, Serving, serving
from drafters.stored import WEIGHTS
from inference.doctor.finding import Finding
from inference.doctor.patient import Patient
from inference.served import Job, Served
from inference.served.comparison import engine_facts, sameness

_SLACK = 0.1  # share of our accepted drafts that rounding may cost an engine
_TOO_FEW = 2  # accepted drafts a prompt below which a loss cannot be told from chance


def served(patient: Patient) -> Iterator[Finding]:
    """Export the drafter to the engine's format and read it back; then decode in the engine.

    Yields `export` and `engine`.
    """
    missing = _missing(patient)
    if missing:
        yield Finding("export", "skipped", missing)
        yield Finding("engine", "skipped", missing)
        return
    assert patient.stored is not None
    assert patient.engine is not None
    way = serving(patient.engine.name, patient.stored.family)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "theirs"
        yield _exported(patient, way, folder)
        yield _accepted(patient, way, folder)


def _missing(patient: Patient) -> str:
    """Return why there is nothing to look at; empty if there is something."""
    if patient.engine is None:
        return "no engine was named (--engine)"
    if patient.stored is None or patient.neural is None:
        return "it is no folder that was trained here"
    if (patient.engine.name, patient.stored.family) not in SERVED:
        return f"{patient.engine.name} serves no {patient.stored.family} drafters of ours"
    return ""


def _exported(patient: Patient, way: Serving, folder: Path) -> Finding:
    """Write the engine's format and, where it is read here too, compare what comes back."""
    link, target = "export", patient.target
    assert patient.stored is not None
    ours = patient.stored.folder
    try:
        export_drafter(ours, way.format, folder, target)
        if not claiming(Foreign.read(folder)):
            return Finding(link, "ok", f"written as {way.format}, which is not read back here")
        back = folder.with_name("back")
        import_drafter(folder, back, target)
    except UserError as error:
        fix = "train with options that the format has a place for (docs/formats.md)"
        return Finding(link, "broken", str(error), fix)
    before, after = read_ours(ours, target).tensors, load_file(back / WEIGHTS)
    different = [name for name in sorted(after) if not torch.equal(before[name], after[name])]
    if different:
        fix = "this is a defect of the format's key table: report it with this line"
        said = f"written as {way.format} and read back, {', '.join(different[:3])} differ"
        return Finding(link, "broken", said, fix)
    return Finding(link, "ok", f"{way.format}: {len(after)} tensors come back bit for bit")


def _accepted(patient: Patient, way: Serving, folder: Path) -> Finding:
    """Compare what the engine accepts on the same prompts with what was accepted here."""
    link, engine, target = "engine", patient.engine, patient.target
    assert engine is not None
    prompts = [list(prompt) for prompt in patient.prompts]
    dtype = str(target.dtype).removeprefix("torch.")
    plain = Job(target.folder, prompts, patient.new_tokens, dtype, engine.threads)
    try:
        alone = engine.run(plain)
        done = engine.run(plain.drafted(folder, way, patient.depth))
    except UserError as error:
        fix = "see what this engine can serve on this machine in docs/serving.md"
        return Finding(link, "broken", str(error), fix)
    return _compared(patient, alone, done)


def _compared(patient: Patient, alone: Served, done: Served) -> Finding:
    link = "engine"
    outputs = [text.output for text in patient.texts]
    here, rounds = sum(sum(o.accepted) for o in outputs), sum(o.rounds for o in outputs)
    facts = engine_facts(done, patient.depth)
    same = sameness(patient.target, patient.prompts, alone.outputs, done.outputs)
    figures = {"accepted_here": here, "rounds_here": rounds, "greedy": same, "served": facts}
    said = (
        f"{done.version} accepted {done.accepted} drafts, {here} are accepted here on the same "
        f"prompts; {same['equal']} of {len(outputs)} of its texts equal its plain ones"
    )
    # engines and this library end a text differently: a round a prompt is no loss
    ends = len(outputs) * max(1.0, here / max(rounds, 1))
    if here - done.accepted > _SLACK * here + ends:
        fix = (
            "compare the engine's tapped layers, draft ids and flags with the exported "
            "config.json (docs/formats.md, Traps)"
        )
        return Finding(link, "broken", said, fix, figures)
    if here < _TOO_FEW * len(outputs):
        return Finding(link, "note", f"{said}: too few to judge", figures=figures)
    return Finding(link, "ok" if not same["different"] else "note", said, figures=figures)

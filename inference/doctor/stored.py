"""Links that the folder alone decides, and what its training says: no text is decoded for them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from drafters.errors import UserError
from drafters.fingerprint import Fingerprint, template_digest
from inference.doctor.finding import Finding
from inference.doctor.patient import Patient
from inference.prompts import chat_ids, has_template

_PROBE = [{"role": "user", "content": "Name three fruits."}]


def fingerprint(patient: Patient) -> Finding:
    """Compare the target that the drafter was made for with this one."""
    link, stored = "fingerprint", patient.stored
    if stored is None:
        return Finding(link, "skipped", "the drafter names no target")
    here = Fingerprint.of(patient.target)
    found = stored.made_for.difference(here)
    if found is None:
        return Finding(link, "ok", f"made for this target ({here.weights})")
    field, theirs, ours = found
    if field == "tokenizer" and _template_changed(patient):
        return _wrong_template("the chat template's text is another than in training")
    if field == "weights" and stored.made_for.same_model(here):
        return Finding(link, "note", "made for another conversion of the same model")
    return Finding(
        link,
        "broken",
        f"made for {stored.made_for.name}, whose {field} is {theirs}; {patient.target.name} has "
        f"{ours}",
        "give the target it was trained on, or train a drafter for this one",
    )


def tensors(patient: Patient) -> Finding:
    """Look for tensors that are unset, unused, not finite, or the target's own."""
    link, stored = "tensors", patient.stored
    if stored is None and patient.neural is None:
        return Finding(link, "skipped", "a drafter without weights of ours")
    faults = [] if stored is None else stored.faults()
    if faults:
        return Finding(
            link,
            "broken",
            "; ".join(faults),
            "publish it again from the run that trained it; a head of the target's size is one "
            "that a loader tied to the embedding: set tie_word_embeddings false where it was saved",
        )
    found = _tensors_of(patient)
    spoilt = [name for name, t in found.items() if not bool(torch.isfinite(t).all())]
    if spoilt:
        return Finding(
            link,
            "broken",
            f"values that are not finite in {', '.join(spoilt)}",
            "take an earlier checkpoint; train with a lower optim.lr or optim.clip",
        )
    tied = list(_tied(patient, found))
    if tied:
        return Finding(
            link,
            "broken",
            f"{', '.join(tied)} equals the target's own head, value for value: tied to it when it "
            "was loaded or saved, or never trained",
            "save the drafter's own head (tie_word_embeddings false), or train it",
        )
    return Finding(
        link, "ok", f"{len(found)} tensors, all set, all used, all finite", figures=_size(found)
    )


def vocabulary(patient: Patient) -> Finding:
    """Check the ids that draft logits stand for."""
    link = "vocabulary"
    fix = (
        "the table of kept ids is lost or in another form (offsets for absolute ids): publish it "
        "again from the run that trained it"
    )
    try:
        patient.load()
    except UserError as error:
        return Finding(link, "broken", str(error), fix)
    if patient.neural is None or patient.neural.ids is None:
        return Finding(link, "ok", "the target's own vocabulary")
    ids, size = patient.neural.ids.cpu(), patient.target.shape.vocab_size
    ascending = bool((ids[1:] > ids[:-1]).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= size:
        said = f"the {len(ids)} kept ids are not ascending, unique and within 0 to {size - 1}"
        return Finding(link, "broken", said, fix)
    if len(ids) < size and bool((ids == torch.arange(len(ids))).all()):
        said = f"the kept ids are 0 to {len(ids) - 1}: what a table holds that was never filled"
        return Finding(link, "broken", said, fix)
    return Finding(link, "ok", f"{len(ids)} of {size} ids")


def template(patient: Patient) -> Finding:
    """Compare how these prompts are rendered with how the training data was."""
    link, target, trained = "template", patient.target, patient.trained
    if "data" not in trained:
        return Finding(link, "skipped", "the drafter does not say what it was trained on")
    if not has_template(target):
        return Finding(link, "skipped", "the target has no chat template")
    if _template_changed(patient):
        return _wrong_template("the chat template's text is another than in training")
    options = dict(trained["data"].get("template_options") or {})
    given = dict(patient.template_options)
    if chat_ids(target, _PROBE, options) != chat_ids(target, _PROBE, given):
        return _wrong_template(
            f"trained on chats rendered with {options or 'no options'}, these prompts are rendered "
            f"with {given or 'none'}"
        )
    return Finding(link, "ok", f"rendered as in training ({options or 'no options'})")


def dtype(patient: Patient) -> Finding:
    """Compare what the target computes in with what it taught in."""
    link, here = "dtype", patient.target.dtype
    largest = torch.finfo(here).max
    big = [
        name
        for name, t in _tensors_of(patient).items()
        if t.is_floating_point() and float(t.float().abs().max()) > largest
    ]
    if big:
        return Finding(
            link,
            "broken",
            f"{', '.join(big)} holds values beyond {here}, which drafting is done in",
            "load the target in bfloat16 or float32",
        )
    taught = patient.trained.get("target_dtype")
    name = str(here).removeprefix("torch.")
    if taught is not None and taught != name:
        said = f"taught by the target in {taught}, served in {name}: near-ties may fall otherwise"
        return Finding(link, "note", said)
    return Finding(link, "ok", name)


def _template_changed(patient: Patient) -> bool:
    stored = patient.trained.get("chat_template")
    return stored is not None and stored != template_digest(patient.target.tokenizer)


def _wrong_template(said: str) -> Finding:
    return Finding(
        "template",
        "broken",
        said,
        "render prompts as the training data was (--template-options), or train on chats that are "
        "rendered as they will be served",
    )


def _tensors_of(patient: Patient) -> Mapping[str, Tensor]:
    if patient.neural is not None:
        return patient.neural.state_dict()
    return {} if patient.stored is None else patient.stored.tensors()


def _tied(patient: Patient, found: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the matrices that are the target's head on the kept ids, although they were trained."""
    rows, target = _kept(patient, found), patient.target
    own = target.head_rows(rows.to(target.device)).float().cpu()
    frozen = [k for k, v in _scales(patient.trained).items() if not v]
    for name, tensor in found.items():
        if tensor.shape != own.shape or any(name.startswith(prefix) for prefix in frozen):
            continue
        # published drafters are rounded, the target's rows need not be
        if bool((tensor.float().cpu() == own.to(tensor.dtype).float()).all()) or bool(
            (tensor.float().cpu() == own.bfloat16().float()).all()
        ):
            yield name


def _kept(patient: Patient, found: Mapping[str, Tensor]) -> Tensor:
    size = patient.target.shape.vocab_size
    tables = [t for t in found.values() if not t.is_floating_point() and t.ndim == 1]
    ids = tables[0].cpu() if tables else torch.arange(size)
    return ids.clamp(0, size - 1)


def _scales(trained: Mapping[str, Any]) -> Mapping[str, float]:
    return (trained.get("optim") or {}).get("lr_scale") or {}


def _size(found: Mapping[str, Tensor]) -> dict[str, int]:
    return {"values": sum(t.numel() for t in found.values() if t.is_floating_point())}

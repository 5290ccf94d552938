"""Doctor: which link between training and serving is broken, if one is.

"Trains at .9, serves at 1.05" has a dozen causes that all look alike. The links are looked at in
the order in which each rests on those before it, and the first broken one is named with its fix.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drafters.base import Drafter
from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.hub import fetch, is_hub_id
from drafters.registry import method
from drafters.stored import StoredDrafter, read_config
from drafters.target import Target
from inference.doctor.decoding import coverage, decoding, lossless
from inference.doctor.finding import Diagnosis, Finding
from inference.doctor.patient import Patient
from inference.doctor.reading import features, mask, numbering
from inference.doctor.serving import served
from inference.doctor.stored import dtype, fingerprint, template, tensors, vocabulary
from inference.served import Engine

__all__ = ["LINKS", "Diagnosis", "Finding", "Patient", "examine", "patient_of", "stored_of"]

# In order. `taps` and `shift` are weighed against each other; what the decoder guesses may show a
# shift that the weights do not.
LINKS = (
    "fingerprint",
    "tensors",
    "vocabulary",
    "template",
    "dtype",
    "features",
    "mask",
    "taps",
    "shift",
    "coverage",
    "cache",
    "decoding",
    "losslessness",
    "export",
    "engine",
)
_CHECKS: tuple[Callable[[Patient], Finding | Iterator[Finding]], ...] = (
    fingerprint,
    tensors,
    vocabulary,
    template,
    dtype,
    features,
    mask,
    numbering,
    coverage,
    decoding,
    lossless,
    served,
)


def stored_of(spec: str | Path) -> StoredDrafter | None:
    """Read what a folder or hub id holds, before any model is loaded; None: nothing of ours.

    Raises:
        UserError: if there is no drafter of that name, or its folder cannot be read.
    """
    folder = Path(spec)
    if not folder.is_dir():
        if "/" not in str(spec):
            method(str(spec))
            return None
        if not is_hub_id(spec):
            raise UserError(f"drafter {spec}: no such folder; give one that training wrote")
        folder = fetch(str(spec))
    if "drafter" not in read_config(folder):
        return None
    stored = StoredDrafter.read(folder)
    stored.shapes()  # a file that cannot be read is bad input, no broken link
    return stored


def patient_of(
    target: Target,
    drafter: str | Path | Drafter | StoredDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 48,
    template_options: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
) -> Patient:
    """Open a drafter for an examination.

    Args:
        target: it is to draft for.
        drafter: a folder, a name or a hub id as load_drafter takes it, one in memory, or what
            stored_of read.
        prompts: token ids, at least one.
        new_tokens: decoded a prompt.
        template_options: what the chat template was given for the prompts.
        engine: somebody else's, which is to serve the drafter too.

    Raises:
        UserError: if there is no drafter, or nothing to decode.
    """
    if not prompts:
        raise UserError("no prompts were given: give at least one")
    if new_tokens < 4:
        raise UserError(f"max_new_tokens is {new_tokens}: give 4 or more")
    found = Patient(
        target,
        prompts,
        new_tokens=new_tokens,
        template_options=template_options or {},
        engine=engine,
    )
    if isinstance(drafter, StoredDrafter):
        found.stored = drafter
    elif isinstance(drafter, str | Path):
        found.stored = stored_of(drafter)
        if found.stored is None:
            found.drafter = load_drafter(drafter, target)
    else:
        found.drafter = drafter
    return found


def examine(patient: Patient, tick: Callable[[str], None] = lambda _: None) -> Diagnosis:
    """Look at every link up to the first broken one.

    Args:
        patient: from patient_of.
        tick: gets the name of each link as it is done.
    """
    findings: dict[str, Finding] = {}
    for check in _CHECKS:
        found = check(patient)
        for finding in [found] if isinstance(found, Finding) else found:
            findings[finding.link] = finding
            tick(finding.link)
            if finding.status == "broken":
                unreached = {link: Finding(link, "not reached") for link in LINKS}
                findings = unreached | findings
                return Diagnosis(tuple(findings.values()))
    return Diagnosis(tuple(findings[link] for link in LINKS))

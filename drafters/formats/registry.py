"""The formats that are known; a new family adds its dialects to the list, nothing else changes."""

from difflib import get_close_matches
from pathlib import Path

from drafters.errors import UserError
from drafters.formats import (
    block_drafts,
    causal_lm,
    eagle1_flat,
    eagle3_flat,
    eagle3_speculators,
    gguf_file,
    medusa_heads,
    medusa_vllm,
    mtp_speculators,
    peagle_speculators,
)
from drafters.formats.dialect import Dialect
from drafters.formats.foreign import Foreign

DIALECTS: tuple[Dialect, ...] = (
    eagle3_speculators.DIALECT,
    *eagle3_flat.DIALECTS,
    *eagle1_flat.DIALECTS,
    *medusa_heads.DIALECTS,
    medusa_vllm.DIALECT,
    *causal_lm.DIALECTS,
    *block_drafts.DIALECTS,
    *peagle_speculators.DIALECTS,
    mtp_speculators.DIALECT,
    gguf_file.DIALECT,
)


def listing() -> list[str]:
    """Return a line for each format and family: name, directions, family."""
    lines = [f"{d.name:<14}{d.directions:<12}{d.family}" for d in DIALECTS]
    return sorted(lines)


def writer(name: str, family: str) -> Dialect:
    """Return the dialect that writes a family's drafters in a format.

    Raises:
        UserError: if there is none.
    """
    ways = [d for d in DIALECTS if d.write is not None]
    _check_name(name, {d.name for d in ways}, "written")
    for dialect in ways:
        if (dialect.name, dialect.family) == (name, family):
            return dialect
    formats = sorted(d.name for d in ways if d.family == family)
    raise UserError(
        f"the format {name} holds no {family} drafters: "
        + (f"give --to {', '.join(formats)}" if formats else "none is written for this family")
    )


def claiming(foreign: Foreign) -> list[Dialect]:
    """Return the dialects that recognise a folder; the likeliest first."""
    return [d for d in DIALECTS if d.claims is not None and d.claims(foreign)]


def reader(foreign: Foreign, name: str = "auto") -> Dialect:
    """Return the dialect that a folder is in.

    Args:
        foreign: the folder.
        name: of the format that it must be in; "auto": whichever recognises it.

    Raises:
        UserError: if no dialect recognises it, or another one than the named does.
    """
    ways = [d for d in DIALECTS if d.read is not None]
    if name != "auto":
        _check_name(name, {d.name for d in ways}, "read")
    if "drafter" in foreign.config:
        raise UserError(f"{foreign.folder} is a drafter of ours already: it needs no import")
    found = claiming(foreign)
    if not found:
        config = foreign.config
        kind = config.get("speculators_model_type") or config.get("architectures") or "unknown"
        known = ", ".join(sorted({d.name for d in ways}))
        raise UserError(
            f"{foreign.folder}: a drafter of no format that is read here (kind: {kind}; first "
            f"tensors: {sorted(foreign.headers)[:3]}); these are {known}, and a causal LM drafts "
            "as it is"
        )
    for dialect in found:
        if name in ("auto", dialect.name):
            return dialect
    raise UserError(
        f"{foreign.folder}: not in the format {name}; by its config and tensors it is "
        f"{found[0].name}"
    )


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder in a foreign format where one of ours is wanted.

    Raises:
        UserError: if it is in one; says how to convert it.
    """
    try:
        foreign = Foreign.read(folder)
    except UserError:  # a causal LM's weights may lie in ways that only its loader knows
        return
    names = [dialect.name for dialect in claiming(foreign)]
    if names:
        raise UserError(
            f"{folder} is a drafter in the format {' or '.join(names)}: convert it first with "
            f"python scripts/export.py {folder} --from auto --target TARGET --out FOLDER"
        )


def _check_name(name: str, known: set[str], done: str) -> None:
    if name in known:
        return
    near = get_close_matches(name, known, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(f"no format {name!r} is {done} here{hint}: give {', '.join(sorted(known))}")

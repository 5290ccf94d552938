"""Convert a drafter: ours into what an engine reads, or somebody else's into ours.

    python scripts/export.py --list
    T=$(python scripts/fetch_target.py)
    python scripts/export.py runs/demo/eagle/best --to vllm --target $T --out runs/eagle3-vllm
    python scripts/export.py runs/demo/eagle/best --to speculators --target $T --out runs/spec
    python scripts/export.py DOWNLOADED --from auto --target $T --out runs/imported

Weights keep the dtype that they are stored in. What a format would lose is named, and nothing is
written without --allow-loss. docs/formats.md has the table of formats and their traps.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from console import app, note, run
from drafters.errors import UserError
from drafters.formats.convert import export_drafter, import_drafter
from drafters.formats.registry import listing
from drafters.target import Target

cli = app(__doc__ or "")


class Dtype(StrEnum):
    """What the weights are written in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _list(wanted: bool) -> None:
    if wanted:
        print("\n".join(listing()))
        raise typer.Exit


@cli.command()
def export(
    folder: Annotated[Path, typer.Argument(help="The drafter's folder.")],
    out: Annotated[Path, typer.Option(help="A folder that does not exist yet.")],
    to: Annotated[str | None, typer.Option(help="Format to write; see --list.")] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="Format to read: a name, or auto.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub id of the target: with --from always, with --to where the "
            "drafter's head is the target's, or the format asks for it."
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the written weights; unless given, as stored.")
    ] = None,
    allow_loss: Annotated[
        bool, typer.Option("--allow-loss", help="Go on where the format loses something.")
    ] = False,
    _: Annotated[
        bool,
        typer.Option("--list", callback=_list, is_eager=True, help="Print formats and directions."),
    ] = False,
) -> None:
    """Convert a drafter: ours into what an engine reads, or somebody else's into ours."""
    if (to is None) == (source is None):
        raise UserError("give either --to FORMAT or --from FORMAT (--from auto recognises it)")
    if source is not None and target is None:
        raise UserError("a drafter is imported for a target: give --target too")
    if source is not None and dtype is not None:
        raise UserError("--dtype is for --to; an imported drafter keeps its weights as they are")
    decider = None if target is None else Target.load(target)
    if to is not None:
        kind = None if dtype is None else getattr(torch, dtype.value)
        lost = export_drafter(folder, to, out, decider, dtype=kind, allow_loss=allow_loss)
    else:
        assert source is not None
        assert decider is not None
        lost = import_drafter(folder, out, decider, source, allow_loss=allow_loss)
    for loss in lost:
        note(f"lost: {loss}")
    print(out)


if __name__ == "__main__":
    run(cli)

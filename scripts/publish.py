r"""Publish a trained drafter with its card, to a folder or to the hub.

    python scripts/publish.py runs/demo/eagle/best --to runs/published \
        --benchmark runs/demo/benchmark.json
    python scripts/publish.py runs/demo/eagle/best --to OWNER/NAME --dry-run
    python scripts/publish.py runs/demo/eagle/best --to OWNER/NAME

The hub's token is read where huggingface_hub keeps it (`hf auth login`, HF_TOKEN) and never shown.
A repository is private unless --public is given. --dry-run prints what would be published and the
card; it writes nothing and asks no network. Exit code 2: bad input.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from console import app, note, run
from drafters.errors import UserError
from drafters.hub import is_hub_id, push
from drafters.publication import CARD, Publication

cli = app(__doc__ or "")


@cli.command()
def publish(
    folder: Annotated[Path, typer.Argument(help="A drafter that training wrote.")],
    to: Annotated[str, typer.Option(help="A folder, or OWNER/NAME on the hub.")],
    benchmark: Annotated[
        Path | None, typer.Option(help="The benchmark.json that measured it.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public/--private", help="Who may read it on the hub.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be published, and stop.")
    ] = False,
) -> None:
    """Publish a trained drafter with its card, to a folder or to the hub."""
    hub = is_hub_id(to)
    if hub and "@" in to:
        raise UserError(f"--to {to}: give OWNER/NAME without a revision")
    if public and not hub:
        raise UserError(f"--public is for the hub, and {to} is a folder: leave it out")
    found = Publication.of(folder, to, benchmark)
    where = f"hub {to}, {'open to all' if public else 'private'}" if hub else f"folder {to}"
    for name, size in found.sizes.items():
        note(f"{name}: {size} bytes")
    if dry_run:
        note(f"would publish to {where}; nothing was written")
        print(found.texts[CARD], end="")
        return
    if not hub:
        print(found.write(to))
        return
    note(f"publishing to {where}")
    with tempfile.TemporaryDirectory() as work:
        print(push(found.write(Path(work) / "drafter"), to, private=not public))


if __name__ == "__main__":
    run(cli)

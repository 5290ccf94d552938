"""Files: the page and what lies beside it, written from benchmark.json and its traces."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drafters.errors import UserError
from drafters.whole import write_text
from inference.page import tables
from inference.page.render import render

FILE = "report.html"
NO_PLOTS = "report.html and plots need matplotlib: pip install 'specdrafters[report]'"


def write_page(
    result: Mapping[str, Any], traces: list[dict[str, Any]], folder: Path
) -> Path | None:
    """Write FOLDER/report.html, plots/, drafters.csv, categories.csv, prompts.csv and table.tex.

    Args:
        result: benchmark.json.
        traces: of the same run; empty: no replay.
        folder: made if needed.

    Returns:
        The page; None without matplotlib: then nothing but the tables is written.

    Raises:
        UserError: if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tables.write_tables(result, folder)
        if find_spec("matplotlib") is None:
            return None
        from inference.page import plots  # an extra, and slow to import

        drawn = plots.figures(result)
        page = render(result, {n: plots.inline(f, n) for n, f in drawn.items()}, traces)
        plots.save(drawn, folder / "plots")
        write_text(folder / FILE, page)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): give --out") from error
    return folder / FILE

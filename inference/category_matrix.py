"""Category matrix: speed-ups as Spec-Bench prints them, drafters down, categories across."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from inference.page.labels import number
from inference.tune_report import labels


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return the matrix of a benchmark with drafters and more than one category; else nothing.

    A cell is sum(tokens) / sum(seconds) over the same of plain decoding, decode only; Spec-Bench
    averages the questions' own speeds instead.

    Args:
        result: benchmark.json.
    """
    drafters = result["drafters"]
    categories = list(dict.fromkeys(name for one in drafters for name in one["by_category"]))
    if len(categories) < 2:
        return []
    found = Table(
        title="speed-up by category",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    found.add_column("drafter", no_wrap=True)
    for heading in (*categories, "tau", "overall"):
        found.add_column(heading, justify="right", no_wrap=True)
    found.add_row("none", *("1.00",) * (len(categories) + 2))
    for one in drafters:
        parts = (one["by_category"].get(name, {"speedup": None}) for name in categories)
        values = [*(part["speedup"] for part in parts), one["tau"], one["speedup"]]
        found.add_row(" ".join(labels(one["name"])), *map(number, values))
    return [found]

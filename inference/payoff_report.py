"""Payoff report: the table of what chains bring, what it assumes, and one line to go by."""

import math
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

ASSUMED = {
    "even": "one alpha for every depth, whatever stands above it",
    "measured": "alpha by depth as measured, rounds that drafted nothing counted; no longer chains",
    "flat": "T(n) = T(1): a forward takes one time however many tokens it has",
    "roofline": "forwards of up to {flat} tokens in all rows take one time, larger ones grow with "
    "their size",
    "typed": "T(n) as typed, straight lines between",
    "serial": "the target waits while drafts are made",
    "overlap": "the drafter has a device of its own and goes on while the target verifies; that "
    "serves where all is accepted and its next guess is the bonus",
    "costs": "costs: {costs}",
    "c": "c = {c:g} of a plain round for every drafted depth, and {overhead:g} in all for a round "
    "with drafts",
}


def table(found: Mapping[str, Any], title: str) -> Table:
    """Return one line a chain.

    Args:
        found: of Payoff.report.
        title: of the table.
    """
    best = found["best"]["gamma"] if found["best"] else 0
    shown = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("gamma", "tau", "round", "speed-up", "break-even alpha"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for line in found["chains"][: max(8, best + 4)]:
        mark = " best" if line["gamma"] == best else ""
        shown.add_row(
            f"{line['gamma']}",
            f"{line['tau']:.2f}",
            f"{line['round']:.2f}",
            f"{line['speedup']:.2f}{mark}",
            from_alpha(line["break_even_alpha"]),
        )
    return shown


def advice(found: Mapping[str, Any]) -> list[str]:
    """Return lines: the best chain, where longer ones and larger batches stop paying."""
    lines: list[str] = []
    if asked := found["asked"]:
        lines.append(
            f"gamma {asked['gamma']}: {asked['tau']:.2f} tokens a round that costs "
            f"{asked['round']:.2f} plain ones: {asked['speedup']:.2f} times; it pays from alpha "
            f"{from_alpha(asked['break_even_alpha'])} on"
        )
    if best := found["best"]:
        longest = " (the longest weighed)" if best == found["chains"][-1] else ""
        lines.append(
            f"best: gamma {best['gamma']}{longest}, {best['speedup']:.2f} times plain decoding"
        )
    else:
        lines.append("no chain pays: decode plainly")
    if found["stops_at_gamma"]:
        lines.append(f"chains of {found['stops_at_gamma']} and more slow down")
    if found.get("last_batch") is not None:
        batch = found["last_batch"]
        lines.append(f"it pays up to {batch} rows" if batch else "it pays at no batch")
    return lines


def from_alpha(value: float | None) -> str:
    """Return the least alpha in thousandths that pays; - where none does.

    >>> from_alpha(0.45531), from_alpha(None)
    ('.456', '-')
    """
    if value is None:
        return "-"
    return f"{math.ceil(1000 * value - 1e-9) / 1000:.3f}".removeprefix("0")

"""Tables: a benchmark's figures as CSV for spreadsheets and LaTeX for papers."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inference.page.labels import drafter_names, interval, number, percent, shapes

_TEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
_HEADINGS = ("drafter", "shape", "tau", "distinct-4", "looped", "alpha", "speed-up", "95\\%")
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet drops the last two
_PAIRS = ("tau_interval", "speedup_interval")


def write_tables(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write drafters.csv, categories.csv, prompts.csv (where there are figures) and table.tex."""
    drafters = result["drafters"]
    parts = {
        "drafters.csv": [_scalars(one) for one in drafters],
        "categories.csv": _parts(drafters, "by_category"),
        "prompts.csv": [
            {"drafter": one["name"], **line}
            for one in drafters
            for line in one.get("by_prompt", ())
        ],
    }
    paths: list[Path] = []
    for name, lines in parts.items():
        if lines:
            paths.append(folder / name)
            write_csv(paths[-1], lines)
    paths.append(folder / "table.tex")
    paths[-1].write_text(latex(result), encoding="utf-8")
    return paths


def latex(result: Mapping[str, Any]) -> str:
    """Return the table of drafters; it needs the package booktabs."""
    plain = result["baseline"]
    marks = [percent(plain.get("distinct_4")), percent(plain["looped_share"])]
    rows = [["none", "", "1.00", *marks, "", "1.00", ""]]
    named = zip(drafter_names(result), shapes(result), result["drafters"], strict=True)
    for name, shape, one in named:
        marks = [percent(one.get("distinct_4")), percent(one["looped_share"])]
        rates = [number(one["alpha"]), number(one["speedup"]), interval(one["speedup_interval"])]
        rows.append([name, shape, number(one["tau"]), *marks, *rates])
    body = [" & ".join(tex(cell) for cell in row) + r" \\" for row in rows]
    head = [r"\begin{tabular}{llrrrrrr}", r"\toprule", " & ".join(_HEADINGS) + r" \\", r"\midrule"]
    return "\n".join([*head, *body, r"\bottomrule", r"\end{tabular}", ""])


def tex(text: str) -> str:
    r"""Return a text that LaTeX prints as it is.

    >>> tex("50% of a_b")
    '50\\% of a\\_b'
    """
    return "".join(_TEX.get(character, character) for character in text)


def _scalars(one: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in one.items():
        if key in _PAIRS:
            low, high = value or (None, None)
            found |= {f"{key}_low": low, f"{key}_high": high}
        elif not isinstance(value, dict | list | tuple):
            found[key] = value
    return found


def _parts(drafters: Iterable[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    return [
        {"drafter": one["name"], "category": name, **_scalars(part)}
        for one in drafters
        for name, part in one[key].items()
    ]


def write_csv(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write lines under the names of their values; no text in them is a formula."""
    names = list(dict.fromkeys(key for line in lines for key in line))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in line.items()} for line in lines)


def _cell(value: object) -> object:
    """Return a text that no spreadsheet takes for a formula; numbers as they are."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULAS) else value

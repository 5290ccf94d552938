"""Hold benchmark.json files together: what changed from the first to each other one.

    python scripts/compare.py runs/before runs/after
    python scripts/compare.py before.json after.json --fail-on-regression --tolerance 0.02

Drafters are matched by method and shape, prompts by category and id; intervals are over prompts, in
pairs. Exit code 1 with --fail-on-regression if something got worse by more than noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from console import app, note, run
from drafters.errors import UserError
from inference.page.labels import full_names
from inference.regression import compare_runs
from inference.report import as_written, read
from training.commandline import Screen

cli = app(__doc__ or "")

_STYLES = {"regressed": "bold red", "improved": "green"}


@cli.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="benchmark.json files or their folders.")],
    tolerance: Annotated[float, typer.Option(help="A loss up to this share is none.")] = 0.0,
    fail_on_regression: Annotated[
        bool, typer.Option("--fail-on-regression", help="Exit with 1 if something got worse.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> int:
    """Hold benchmark.json files together: what changed from the first to each other one."""
    if len(runs) < 2:
        raise UserError(f"{len(runs)} run given: give two or more, the one to compare with first")
    if not 0 <= tolerance < 1:
        raise UserError(f"tolerance is {tolerance}: give a share from 0 up to 1, such as 0.02")
    first, *others = [read(path) for path in runs]
    with as_written(*runs):
        names = [dict(zip(_specs(run), full_names(run), strict=True)) for run in others]
        found = [
            {"old": str(runs[0]), "new": str(path), **compare_runs(first, other, tolerance)}
            for path, other in zip(runs[1:], others, strict=True)
        ]
    for one in found:
        if not one["drafters"]:
            raise UserError(
                f"{one['old']} and {one['new']} have no drafter of one method and shape in common: "
                "measure both with the same --drafter"
            )
    if as_json:
        print(json.dumps(found))
    else:
        console = Screen()
        for one, shown in zip(found, names, strict=True):
            console.show(_table(one, shown))
    for one in found:
        _notes(one)
    worse = any(one["regressions"] for one in found)
    return 1 if worse and fail_on_regression else 0


def _specs(run: Mapping[str, Any]) -> list[str]:
    return [one["name"] for one in run["drafters"]]


def _table(found: Mapping[str, Any], shown: Mapping[str, str]) -> Table:
    table = Table(title=Text(f"{found['old']} -> {found['new']}"), box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("drafter", overflow="fold")
    for heading in ("tau", "ratio", "95%", "speed-up", "ratio", "95%", "pairs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found["drafters"]:
        cells = [cell for figure in ("tau", "speedup") for cell in _cells(one[figure])]
        table.add_row(Text(shown[one["name"]]), *cells, str(one["prompts_in_pairs"]))
    return table


def _cells(figure: Mapping[str, Any]) -> list[Text]:
    style = _STYLES.get(figure["verdict"], "")
    between = figure["interval"]
    mark = {"regressed": " worse", "improved": " better"}.get(figure["verdict"], "")
    return [
        Text(f"{_number(figure['old'])} -> {_number(figure['new'])}"),
        Text(_number(figure["ratio"]) + mark, style=style),
        Text("" if between is None else f"{between[0]:.2f}-{between[1]:.2f}"),
    ]


def _notes(found: Mapping[str, Any]) -> None:
    for warning in found["warnings"]:
        note(f"not the same in {found['new']}: {warning}")
    if found["missing"]:
        note(f"not in {found['new']}: {', '.join(found['missing'])}")
    if found["added"]:
        note(f"only in {found['new']}: {', '.join(found['added'])}")
    for line in found["regressions"]:
        note(f"regression in {found['new']}: {line}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    run(cli)

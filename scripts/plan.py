"""Say beforehand when drafts pay, and what training a drafter takes.

    python scripts/plan.py speedup --alpha 0.8 --c 0.05
    python scripts/plan.py speedup --alpha 0.7 --overhead 0.2 --gamma 4 --batch 16 --flat 256
    python scripts/plan.py speedup --benchmark runs/demo --drafter runs/demo/eagle/best

Costs are in plain rounds: --c of every drafted depth, --overhead of a round with drafts in all.
docs/metrics.md has the formulas; what they assume is printed. Nothing is run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from console import ENGINE_HELP, Dtype, Engine, app, run
from drafters.errors import UserError
from drafters.target import Target
from inference.deals import deals, read_benchmark
from inference.payoff import Payoff, last_batch, typed_prices
from inference.payoff_report import ASSUMED, advice, table

cli = app("Say beforehand when drafts pay, and what training a drafter takes.")

_WIDTH = 100  # of tables where stdout is no terminal
_MEASURED, _TYPED = "Measured", "Typed"
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


@dataclass(frozen=True)
class Typed:
    """What was typed instead of measured."""

    alpha: float
    c: float
    overhead: float
    batch: int
    flat: int
    verify: str


@cli.callback()
def plan() -> None:
    """Say beforehand when drafts pay, and what training a drafter takes."""


@cli.command()
def speedup(
    alpha: Annotated[
        float | None,
        typer.Option(help="Share of drafts accepted, given those above.", rich_help_panel=_TYPED),
    ] = None,
    c: Annotated[
        float, typer.Option("--c", help="Cost of every drafted depth.", rich_help_panel=_TYPED)
    ] = 0.0,
    overhead: Annotated[
        float,
        typer.Option(help="Cost of a round with drafts, in all.", rich_help_panel=_TYPED),
    ] = 0.0,
    batch: Annotated[int, typer.Option(help="Rows.", rich_help_panel=_TYPED)] = 1,
    flat: Annotated[
        int,
        typer.Option(
            help="Tokens in all rows up to which a forward takes one time; 0: any number.",
            rich_help_panel=_TYPED,
        ),
    ] = 0,
    verify: Annotated[
        str,
        typer.Option(help="T(n)/T(1) at this batch: 1:1,4:1.2,8:1.9.", rich_help_panel=_TYPED),
    ] = "",
    benchmark: Annotated[
        Path | None,
        typer.Option(help="A benchmark.json, or its folder.", rich_help_panel=_MEASURED),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="One of its drafters; else all.", rich_help_panel=_MEASURED),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Take the costs that this machine keeps of it.", rich_help_panel=_MEASURED
        ),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Of --target.", rich_help_panel=_MEASURED)
    ] = Dtype.float32,
    engine: Annotated[
        Engine | None, typer.Option(help=ENGINE_HELP, rich_help_panel=_MEASURED)
    ] = None,
    gamma: Annotated[int | None, typer.Option(help="Also say what this chain brings.")] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="The drafter has a device of its own.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what chains of drafts bring, which is best, and where they stop paying."""
    if (alpha is None) == (benchmark is None):
        raise UserError("give --alpha with --c or --overhead, or --benchmark, and not both")
    if benchmark is None:
        assert alpha is not None
        typed = Typed(alpha, c, overhead, batch, flat, verify)
        found = [_typed(typed, gamma, overlap=overlap)]
    else:
        if (c, overhead, batch, flat, verify) != (0, 0, 1, 0, ""):
            raise UserError(
                "--benchmark has costs: leave out --c, --overhead, --batch, --flat and --verify"
            )
        kept = Target.load(target, dtype=dtype.value, engine=engine) if target else None
        found = [
            {
                "drafter": deal.name,
                "assumed": _assumed("measured", "costs", overlap, costs=deal.costs),
                **deal.payoff.report(gamma),
            }
            for deal in deals(read_benchmark(benchmark), drafter, kept, overlap=overlap)
        ]
    if as_json:
        print(json.dumps(found))
        return
    console = _console()
    for one in found:
        console.print(table(one, f"{one['drafter']}, in plain rounds"))
        for text in (*advice(one), *(f"assumed: {line}" for line in one["assumed"])):
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def _typed(typed: Typed, gamma: int | None, *, overlap: bool) -> dict[str, Any]:
    prices = typed_prices(typed.c, typed.overhead, typed.batch, typed.flat, typed.verify)
    payoff = Payoff.even(typed.alpha, prices, overlap=overlap)
    forward = "typed" if typed.verify else "roofline" if typed.flat else "flat"
    last = None
    if typed.flat:
        last = last_batch(typed.alpha, typed.c, typed.overhead, typed.flat, overlap=overlap)
    values = {"c": typed.c, "overhead": typed.overhead, "flat": typed.flat}
    return {
        "drafter": f"alpha {typed.alpha:g}, {typed.batch} a batch",
        "assumed": _assumed("even", forward, overlap, "c", **values),
        **payoff.report(gamma),
        "last_batch": last,
    }


def _assumed(alpha: str, forward: str, overlap: bool, *more: str, **values: object) -> list[str]:
    names = (alpha, forward, *more, "overlap" if overlap else "serial")
    return [ASSUMED[name].format(**values) for name in names]


def _console() -> Console:
    console = Console()
    console.width = console.width if console.is_terminal else _WIDTH
    return console


if __name__ == "__main__":
    run(cli)

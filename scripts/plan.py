r"""Say beforehand when drafts pay, and what training a drafter takes.

    python scripts/plan.py speedup --alpha 0.8 --c 0.05
    python scripts/plan.py speedup --alpha 0.7 --overhead 0.2 --gamma 4 --batch 16 --flat 256
    python scripts/plan.py speedup --benchmark runs/demo --drafter runs/demo/eagle/best
    python scripts/plan.py train --target llama-3.1-8b --method eagle3 --tokens 500M \
        --gpus 8 --gpu h100 drafter.draft_vocab_size=32000
    python scripts/plan.py train --calibrate runs/demo/eagle --calibrate runs/demo/medusa

Costs are in plain rounds: --c of every drafted depth, --overhead of a round with drafts in all.
docs/metrics.md has the formulas; what they assume is printed. `train` counts a target of
configs/targets, or any config.json, without its weights; docs/scale.md works examples.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from console import ENGINE_HELP, Dtype, Engine, app, run
from drafters.errors import UserError
from drafters.settings import find_config, load
from drafters.target import Target
from inference import report
from inference.deals import deals
from inference.payoff import Payoff, last_batch, typed_prices
from inference.payoff_report import ASSUMED, advice, table
from training.accelerators import ACCELERATORS, accelerator
from training.achieved import achieved, compared
from training.commandline import Screen
from training.options import TrainSettings
from training.paper_target import paper_target
from training.projection import Project, project
from training.projection_report import calibration, tables, verdict
from training.workload import workload

cli = app(__doc__ or "")

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
    """Say what chains of drafts bring, which is best, and where they stop paying.

    Examples:
        python scripts/plan.py speedup --alpha 0.8 --c 0.05
    """
    if (alpha is None) == (benchmark is None):
        raise UserError("give --alpha with --c or --overhead, or --benchmark, and not both")
    if benchmark is None:
        assert alpha is not None
        if drafter is not None or target is not None:
            raise UserError("--drafter and --target go with --benchmark: leave them out")
        typed = Typed(alpha, c, overhead, batch, flat, verify)
        found = [_typed(typed, gamma, overlap=overlap)]
    else:
        if (c, overhead, batch, flat, verify) != (0, 0, 1, 0, ""):
            raise UserError(
                "--benchmark has costs: leave out --c, --overhead, --batch, --flat and --verify"
            )
        kept = Target.load(target, dtype=dtype.value, engine=engine) if target is not None else None
        with report.as_written(benchmark):
            found = [
                {
                    "drafter": deal.name,
                    "assumed": _assumed("measured", "costs", overlap, costs=deal.costs),
                    **deal.payoff.report(gamma),
                }
                for deal in deals(report.read(benchmark), drafter, kept, overlap=overlap)
            ]
    if as_json:
        print(json.dumps(found))
        return
    console = Screen()
    for one in found:
        console.show(table(one, f"{one['drafter']}, in plain rounds"))
        _print(console, [*advice(one), *(f"assumed: {line}" for line in one["assumed"])])


@cli.command()
def train(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Of the training.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="A name of configs/targets, a config.json or its folder.")
    ] = None,
    method: Annotated[str, typer.Option(help="Drafter family.")] = "eagle3",
    config: Annotated[Path | None, typer.Option(help="Settings of the training as YAML.")] = None,
    tokens: Annotated[str, typer.Option(help="Of all chats: 500M, 2B.")] = "100M",
    gpus: Annotated[int, typer.Option(help="Devices.")] = 1,
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(ACCELERATORS)}.")] = "h100",
    length: Annotated[int, typer.Option(help="Tokens of a chat.")] = 2048,
    rows: Annotated[int, typer.Option(help="Answers that a copy writes at a time.")] = 128,
    target_bytes: Annotated[
        float, typer.Option(min=0.25, help="Bytes of a value of the target: 2, or 1 in FP8.")
    ] = 2.0,
    calibrate: Annotated[
        list[Path] | None, typer.Option(help="Runs of this machine; the first sets the rate.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what training a drafter takes: memory of a device, disk, hours; or check it on runs.

    Examples:
        python scripts/plan.py train --target llama-3.1-8b --tokens 500M --gpus 8 --gpu h100
    """
    if not target and not calibrate:
        raise UserError("give --target, such as llama-3.1-8b, or --calibrate with a run's folder")
    result: dict[str, Any] = {}
    console = Screen()
    runs, amount = [achieved(folder) for folder in calibrate or []], _tokens(tokens)
    if target:
        for name, value in (("gpus", gpus), ("length", length), ("rows", rows)):
            if value < 1:
                raise UserError(f"{name} is {value}: give 1 or more")
        needed = ("target=paper", "output=paper", "data.path=paper")
        files = [find_config(config)] if config else []
        settings = load(TrainSettings, files, [*needed, *(overrides or [])])
        paper = paper_target(target)
        plan = Project(
            target=paper,
            work=workload(method, settings.drafter, paper.shape, loss=settings.loss),
            device=accelerator(gpu),
            devices=gpus,
            tokens=amount,
            epochs=settings.schedule.epochs or 1.0,
            batch_tokens=settings.data.batch_tokens,
            length=length,
            rows=rows,
            chunk=settings.loss.chunk,
            target_bytes=target_bytes,
        )
        result["plan"] = project(plan)
        if not as_json:
            title = f"{method} for {paper.name}, {tokens} tokens, {gpus} {gpu}"
            console.show(*tables(result["plan"], title))
            assumed = [f"assumed: {line}" for line in result["plan"]["assumed"]]
            _print(console, [verdict(result["plan"], gpus), *assumed])
    if runs:
        result["calibration"] = {"flops": runs[0].rate, "lines": compared(runs)}
        if not as_json:
            lines = result["calibration"]["lines"]
            console.show(calibration(lines, runs[0].rate, runs[0].name))
    if as_json:
        print(json.dumps(result))


def _tokens(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMB]?)", text)
    if match is None or not float(match[1]):
        raise UserError(f"tokens is {text!r}: give a number such as 200k, 500M or 2B")
    return float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9}[match[2]]


def _print(console: Screen, lines: list[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


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


if __name__ == "__main__":
    run(cli)

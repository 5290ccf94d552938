r"""Measure drafters against plain decoding on the same prompts, in turns.

    T=$(python scripts/fetch_target.py)
    python scripts/benchmark.py --target $T --prompts configs/prompts/demo.jsonl --limit 4 \
        --max-new-tokens 32 --drafter ngram:gamma=4 --out runs/try
    python scripts/benchmark.py --target $T --prompts configs/prompts/demo.jsonl \
        --drafter runs/demo/eagle/best:growth=chain,gamma=3 \
        --drafter runs/demo/eagle/best:growth=dynamic,nodes=8,width=3,depth=4 --peer hf

Prints a table and writes OUT/benchmark.json, report.html (with the extra `report`), plots, tables
and traces; docs/reports.md says what they hold, docs/metrics.md defines every figure. Exit code 1
if an output differs or plain decoding was too slow to be compared with.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from console import (
    DEVICE_HELP,
    ENGINE_HELP,
    WEIGHTS_HELP,
    Dtype,
    Engine,
    Plugins,
    Weights,
    app,
    command_line,
    note,
    progress,
    run,
)
from drafters.registry import methods
from drafters.sampling import Warp
from drafters.target import Target
from drafters.whole import check_place
from inference import category_matrix, report
from inference.bench import BenchSettings, Contender, Measurement, contenders, measure, steps
from inference.page import NO_PLOTS, write_page
from inference.peer import Peer
from inference.peers import parse_peer
from inference.prompts import Prompt, read_prompts
from inference.spec import Spec
from inference.summary import summarise
from inference.traces import read_traces, write_traces
from training.commandline import Screen

cli = app(__doc__ or "")


def _list(wanted: bool) -> None:
    if wanted:
        print("\n".join(sorted(methods())))
        raise typer.Exit


@cli.command()
def benchmark(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target.")],
    prompts: Annotated[Path, typer.Option(help="JSONL, Parquet: turns, prompt, messages.")],
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="D:growth=chain,gamma=4 or A+B:...; several. verify=typical is LOSSY."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="At most this many a prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the smallest set of this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampled outputs.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="What the target computes in.")] = Dtype.float32,
    engine: Annotated[Engine | None, typer.Option(help=ENGINE_HELP)] = None,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    weights: Annotated[Weights | None, typer.Option(help=WEIGHTS_HELP)] = None,
    rows: Annotated[int, typer.Option(help="Prompts that decode together.")] = 1,
    repeats: Annotated[int, typer.Option(help="How often every prompt is decoded.")] = 3,
    warmup: Annotated[int, typer.Option(help="Prompts before the clock runs.")] = 3,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Other decoding in the same turns: hf, hf-lookup, hf-assistant=FOLDER, or a "
            "server as NAME=URL."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where files go.")] = Path("runs/benchmark"),
    page: Annotated[
        bool, typer.Option("--report/--no-report", help="Write report.html, plots and tables too.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print benchmark.json instead of the table.")
    ] = False,
    _: Annotated[
        bool,
        typer.Option("--list", callback=_list, is_eager=True, help="Print the drafters' names."),
    ] = False,
    _plugin: Plugins = None,
) -> int:
    """Measure drafters against plain decoding on the same prompts, in turns."""
    check_place(out, folder=True)
    specs = [Spec.parse(text) for text in drafter or []]
    warp = Warp(temperature, top_k, top_p, min_p)
    settings = BenchSettings(max_new_tokens, warp, seed, rows, repeats, warmup)
    questions = read_prompts(prompts, limit)
    decider = Target.load(target, dtype=dtype.value, engine=engine, device=device, weights=weights)
    peers = [parse_peer(text, decider.dtype) for text in peer or []]
    measured = _measure(decider, contenders(decider, specs), questions, settings, peers)
    result = {
        **summarise(measured, str(prompts)),
        "command": command_line(),
        "date": f"{datetime.now(UTC):%F}",
    }
    path = report.write(result, out)
    traces = write_traces(measured, out)
    if as_json:
        print(json.dumps(result))
    else:
        console = Screen()
        console.show(report.table(result), *category_matrix.tables(result))
        if peers:
            console.show(report.peers_table(result))
    note(f"wrote {path}")
    if page:
        shown = write_page(result, read_traces(out), out)
        note(f"wrote {shown}, {traces.name}, plots and tables beside it" if shown else NO_PLOTS)
    for failure in result["failures"]:
        note(f"failed: {failure}")
    return 1 if result["failures"] else 0


def _measure(
    target: Target,
    race: list[Contender],
    prompts: list[Prompt],
    settings: BenchSettings,
    peers: list[Peer],
) -> Measurement:
    total = steps(len(prompts), len(race), settings, len(peers))
    with progress() as bars:
        task = bars.add_task("measuring", total=total)
        return measure(target, race, prompts, settings, lambda: bars.advance(task), peers)


if __name__ == "__main__":
    run(cli)

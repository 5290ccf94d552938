r"""Find the shape that a drafter should draft in on this machine, from measured costs.

    T=$(python scripts/fetch_target.py)
    python scripts/tune.py --target $T --prompts configs/prompts/demo.jsonl --limit 4 \
        --drafter runs/demo/eagle/best --out runs/tune
    python scripts/tune.py --target $T --prompts configs/prompts/demo.jsonl --limit 16 \
        --drafter runs/demo/eagle/best --drafter ngram --rows 1,2,4,8,16 \
        --contexts 200,1000,4000 --temperatures 0,1 --try 3

Measures T(n) and the drafters' time for every number of rows and context, keeps both in the cache
for later runs (growth=cost_aware reads them), measures acceptance in the largest shapes, and prints
the best of all that lie in them. `--try N` benchmarks the best N, and cost_aware, against plain
decoding. A drafter can be pasted into benchmark.py and generate.py as printed. Writes
OUT/tune.json.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from console import (
    DEVICE_HELP,
    ENGINE_HELP,
    Dtype,
    Engine,
    Plugins,
    app,
    note,
    progress,
    run,
)
from drafters.base import Drafter
from drafters.errors import UserError
from drafters.sampling import Warp
from drafters.target import Target
from drafters.untrusted import LARGEST, is_too_large
from drafters.whole import check_place
from inference import report, tune_report
from inference.bench import BenchSettings, contenders, measure, prefix_of, steps
from inference.cost_store import CostStore
from inference.costs import CostTable, Load
from inference.experts import experts_hit, routers
from inference.facts import target_facts
from inference.machine import machine, versions
from inference.meter import WIDE_SIZES, CostMeter, measure_costs
from inference.prompts import Prompt, first_turn_ids, read_prompts
from inference.sampling import Sampling
from inference.spec import Spec
from inference.summary import summarise
from inference.tuning import Candidate, Largest, candidates, named, probes, ranked
from training.commandline import Screen

cli = app(__doc__ or "")

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """What is tuned, and how thoroughly."""

    target: Target
    drafters: list[tuple[Spec, Drafter]]
    prompts: list[Prompt]
    rows: list[int]
    contexts: list[int]
    largest: Largest
    max_new_tokens: int
    samples: int
    tries: int
    repeats: int
    seed: int
    overlap: bool

    @property
    def ids(self) -> list[list[int]]:
        """Return the prompts' first turns."""
        return first_turn_ids(self.target, self.prompts)


@cli.command()
def tune(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target.")],
    prompts: Annotated[Path, typer.Option(help="JSONL, Parquet: turns, prompt, messages.")],
    drafter: Annotated[list[str], typer.Option(help="Folder or name; its shape is not used.")],
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="At most this many a prompt.")] = 128,
    rows: Annotated[str, typer.Option(help="Batch sizes, such as 1,2,4,8,16.")] = "1",
    contexts: Annotated[str, typer.Option(help="Cached tokens that costs are timed over.")] = "200",
    temperatures: Annotated[str, typer.Option(help="Such as 0,0.7,1; 0 is greedy.")] = "0",
    depth: Annotated[int, typer.Option(help="Levels of the largest shapes.")] = 6,
    widths: Annotated[str, typer.Option(help="Nodes expanded a level; 0: chains only.")] = "3",
    samples: Annotated[int, typer.Option(help="How often every cost is timed.")] = 15,
    tries: Annotated[int, typer.Option("--try", help="Benchmark the best so many.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Of the benchmark of --try.")] = 3,
    seed: Annotated[int, typer.Option(help="Of sampled outputs.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="What the target computes in.")] = Dtype.float32,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    engine: Annotated[Engine | None, typer.Option(help=ENGINE_HELP)] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Predict for a drafter on a device of its own.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="Shapes that the table shows of each load.")] = 5,
    out: Annotated[Path, typer.Option(help="Where tune.json goes.")] = Path("runs/tune"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print tune.json instead of the table.")
    ] = False,
    _plugin: Plugins = None,
) -> None:
    """Find the shape that a drafter should draft in on this machine, from measured costs."""
    check_place(out, folder=True)
    specs = [Spec.parse(text) for text in drafter]
    counts, lengths = _whole("rows", rows, 1), _whole("contexts", contexts, 1)
    wide = tuple(width for width in _whole("widths", widths, 0) if width)
    warps = [Warp(value) for value in _numbers("temperatures", temperatures)]
    for name, value, least in (("depth", depth, 1), ("samples", samples, 1), ("try", tries, 0)):
        if value < least:
            raise UserError(f"{name} is {value}: give {least} or more")
    if overlap and tries:
        raise UserError("--overlap predicts and --try measures on this device: leave one out")
    questions = read_prompts(prompts, limit)
    decider = Target.load(target, dtype=dtype.value, device=device, engine=engine)
    room = decider.shape.max_positions - max(WIDE_SIZES) - (samples + 2) * (depth + 1)
    if max(lengths) > room:
        raise UserError(f"contexts go up to {max(lengths)}: this target has room for {room}")
    plan = Plan(
        target=decider,
        drafters=[(spec, spec.load(decider)) for spec in specs],
        prompts=questions,
        rows=counts,
        contexts=lengths,
        largest=Largest(depth, wide),
        max_new_tokens=max_new_tokens,
        samples=samples,
        tries=tries,
        repeats=repeats,
        seed=seed,
        overlap=overlap,
    )
    result = {
        "format_version": FORMAT_VERSION,
        "target": target_facts(decider),
        "machine": machine(),
        "versions": versions(),
        "settings": {
            "prompts_file": str(prompts),
            "prompts": len(questions),
            "max_new_tokens": max_new_tokens,
            "largest": asdict(plan.largest),
            "samples": samples,
            "seed": seed,
            "overlap": overlap,
        },
        "loads": [load for warp in warps for load in _tuned(plan, warp)],
    }
    path = report.write(result, out, tune_report.FILE)
    if as_json:
        print(json.dumps(result))
    else:
        console = Screen()
        console.show(tune_report.table(result, top))
        for line in tune_report.advice(result):
            console.print(line, soft_wrap=True, highlight=False)
    note(f"wrote {path}")


def _tuned(plan: Plan, warp: Warp) -> list[dict[str, Any]]:
    """Return what every load of this temperature should bring, and what the best did."""
    sampling = Sampling(plan.max_new_tokens, warp, plan.seed)
    shapes: list[Candidate] = []
    with progress() as bars:
        task = bars.add_task("acceptance", total=len(plan.drafters))
        for spec, drafter in plan.drafters:
            ids = plan.ids
            shapes += candidates(plan.target, spec, drafter, ids, plan.largest, sampling)
            bars.advance(task)
        table = _costs(plan, warp, bars.track(plan.rows, description="costs"))
    return [
        _load(plan, warp, table, shapes, Load(rows, context))
        for rows in plan.rows
        for context in plan.contexts
    ]


def _costs(plan: Plan, warp: Warp, rows: Any) -> CostTable:
    """Time every load and keep the costs; drafters are timed over the shortest context."""
    store, ids = CostStore(plan.target, warp), plan.ids
    table: CostTable | None = None
    for count in rows:
        for context in sorted(plan.contexts):
            shapes = [
                p for _, drafter in plan.drafters for p in probes(drafter, plan.largest, warp)
            ]
            newer = measure_costs(
                plan.target,
                shapes if context == min(plan.contexts) else [],
                prefix_of(ids, context),
                count,
                warp=warp,
                samples=plan.samples,
                sizes=WIDE_SIZES,
            )
            store.add(newer)
            table = newer if table is None else table.merged(newer)
    assert table is not None
    return table


def _load(
    plan: Plan, warp: Warp, table: CostTable, shapes: list[Candidate], load: Load
) -> dict[str, Any]:
    best = ranked(table, shapes, load, overlap=plan.overlap)
    first = load.context == plan.contexts[0]  # the prompts have one length: one try a batch size
    return {
        "rows": load.rows,
        "context": load.context,
        "temperature": warp.temperature,
        "verify_seconds": {str(n): table.forward(n, load) for n in WIDE_SIZES},
        "plain_seconds": table.plain(load),
        "experts_hit": _experts(plan, load),
        "shapes": [
            {"spec": c.spec, "tau": c.tau, "predicted": value, "shape": asdict(c.shape)}
            for c, value in best
        ],
        "tried": _tried(plan, warp, [c.spec for c, _ in best], load) if first else [],
    }


def _experts(plan: Plan, load: Load) -> dict[str, float]:
    """Return the distinct experts that a layer of a mixture reads, by n; nothing if it is dense."""
    if not routers(plan.target):
        return {}
    prefix = prefix_of(plan.ids, load.context)
    meter = CostMeter(plan.target, prefix, rows=load.rows, sizes=WIDE_SIZES)
    return {str(n): hit for n, hit in experts_hit(meter).items()}


def _tried(plan: Plan, warp: Warp, specs: list[str], load: Load) -> list[dict[str, Any]]:
    """Benchmark the best shapes and every drafter's cost_aware growth."""
    if not plan.tries:
        return []
    width = max(plan.largest.widths, default=1)
    limits = f"growth=cost_aware,nodes=8,width={width},depth={plan.largest.depth}"
    aware = [named(spec, limits) for spec, _ in plan.drafters]
    race = contenders(plan.target, [Spec.parse(s) for s in (*specs[: plan.tries], *aware)])
    asked = plan.prompts * -(-load.rows // len(plan.prompts))  # enough of them for one batch
    settings = BenchSettings(
        plan.max_new_tokens, warp, plan.seed, load.rows, plan.repeats, warmup=2
    )
    with progress() as bars:
        task = bars.add_task("trying", total=steps(len(asked), len(race), settings))
        measured = measure(plan.target, race, asked, settings, lambda: bars.advance(task))
    return [
        {
            "spec": one["name"],
            "tau": one["tau"],
            "measured": one["speedup"],
            "interval": one["speedup_interval"],
        }
        for one in summarise(measured, "")["drafters"]
    ]


def _whole(name: str, text: str, least: int) -> list[int]:
    values = _numbers(name, text)
    if any(value != int(value) or value < least for value in values):
        raise UserError(f"{name} is {text}: give whole numbers of {least} or more, such as 1,4")
    return [int(value) for value in values]


def _numbers(name: str, text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{name} is {text!r}: give numbers with commas between") from None
    if any(map(is_too_large, values)):
        raise UserError(f"{name} is {text}: give numbers up to {LARGEST}")
    if len(set(values)) < len(values):
        raise UserError(f"{name} is {text}: a number is given twice")
    return values


if __name__ == "__main__":
    run(cli)

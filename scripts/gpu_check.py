"""Check a GPU and time it: is decoding right there, and what would drafting bring?

    T=$(python scripts/fetch_target.py)
    python scripts/gpu_check.py --target $T --out runs/gpu          # under 8 minutes
    python scripts/gpu_check.py --device cpu --size tiny            # does everything run?

Greedy equality and trees in float32 and bfloat16 on random tiny targets, fast and static engine;
T(n) and scripted drafts over a random target of --size, whose right tokens are known beforehand, so
that any acceptance can be played; the benchmark of --target with n-grams beside Hugging Face's
generate. Writes OUT/gpu_check.json and prints its tables. Exit code 1 if something is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from console import app, note, run
from drafters.errors import UserError
from drafters.growth import Chain, Growth, Static
from drafters.settings import configs_dir
from drafters.target import Target
from drafters.whole import check_place
from inference import report
from inference.bench import BenchSettings, Contender, contenders, measure
from inference.counting import SIZES, count, counting_target
from inference.device_check import FAMILIES, Case, check_case
from inference.machine import machine, versions
from inference.meter import WIDE_SIZES, CostMeter
from inference.peer import Peer
from inference.peers import parse_peer
from inference.prompts import read_prompts
from inference.scripted import ScriptedDrafter
from inference.spec import Spec
from inference.summary import summarise
from training.commandline import Screen
from training.reader import WeightlessReader

cli = app(__doc__ or "")

FILE = "gpu_check.json"
FORMAT_VERSION = 1
_ENGINES = ("fast", "static")
_SHAPES: tuple[tuple[str, Growth, int], ...] = (
    ("chain", Chain(3), 0),
    ("chain", Chain(7), 0),
    ("static", Static((3, 3, 3)), 2),
)


@dataclass(frozen=True)
class Plan:
    """How much is done.

    Args:
        device: where.
        size: of the random target.
        target: folder or hub id that is benchmarked; None: none.
        prompts: a prompt set.
        limit: prompts of it.
        tokens: new ones a prompt.
        repeats: of every prompt, and a tenth of how often T(n) is timed.
        alpha: of scripted drafts.
    """

    device: str
    size: str
    target: str | None
    prompts: Path
    limit: int
    tokens: int
    repeats: int
    alpha: float


@cli.command()
def gpu_check(
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda if any.")] = None,
    size: Annotated[str, typer.Option(help=f"Of the random target: {', '.join(SIZES)}.")] = "8b",
    target: Annotated[str | None, typer.Option(help="Folder or hub id to benchmark too.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL, Parquet: turns, prompt, messages.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Only the first so many prompts.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="At most this many a prompt.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="How often every prompt is decoded.")] = 2,
    alpha: Annotated[float, typer.Option(help="Acceptance of scripted drafts.")] = 0.8,
    minutes: Annotated[float, typer.Option(min=0, help="No step begins later than this.")] = 7.0,
    out: Annotated[Path, typer.Option(help="Where gpu_check.json goes.")] = Path("runs/gpu"),
) -> int:
    """Check a GPU and time it: is decoding right there, and what would drafting bring?"""
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if place.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device is {place!r} and torch sees no GPU here: give cpu")
    if size not in SIZES:
        raise UserError(f"size is {size!r}: give {', '.join(SIZES)}")
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha is {alpha}: give 0 to 1")
    check_place(out, folder=True)
    if target is not None:
        WeightlessReader.load(target)
    questions = prompts or configs_dir() / "prompts" / "demo.jsonl"
    read_prompts(questions, limit)
    plan = Plan(place, size, target, questions, limit, max_new_tokens, repeats, alpha)
    result = _run(plan, time.monotonic() + 60 * minutes)
    path = report.write(result, out, FILE)
    _show(result)
    note(f"wrote {path}")
    for failure in result["failures"]:
        note(f"failed: {failure}")
    return 1 if result["failures"] else 0


def _run(plan: Plan, end: float) -> dict[str, Any]:
    """Take the steps in turn; one that fails does not keep the next from its turn."""
    steps: dict[str, Callable[[], Any]] = {"cases": partial(_cases, plan)}
    for engine in _ENGINES:
        steps[f"counting {engine}"] = partial(_counting, plan, engine)
    if plan.target is not None:
        for engine in _ENGINES:
            steps[f"target {engine}"] = partial(_target, plan, plan.target, engine)
    found: dict[str, Any] = {}
    failures: list[str] = []
    for name, step in steps.items():
        if time.monotonic() > end:
            note(f"{name}: left out, --minutes is over")
            continue
        start = time.monotonic()
        try:
            found[name] = step()
        except (UserError, RuntimeError) as error:
            failures.append(f"{name}: {str(error).splitlines()[0]}")
        note(f"{name}: {time.monotonic() - start:.0f} s")
    for case in found.get("cases", []):
        where = f"{case['family']} {case['engine']} {case['dtype']}"
        failures += [f"{where}: {failure}" for failure in case["failures"]]
    for name, part in found.items():
        if name != "cases":
            failures += [f"{name}: {failure}" for failure in part["failures"]]
    return {
        "format_version": FORMAT_VERSION,
        "device": plan.device,
        "machine": machine(),
        "versions": versions(),
        "alpha": plan.alpha,
        "cases": found.pop("cases", []),
        "benchmarks": found,
        "failures": failures,
    }


def _cases(plan: Plan) -> list[dict[str, Any]]:
    return [
        check_case(Case(family, engine, dtype), plan.device, plan.tokens)
        for dtype in (torch.float32, torch.bfloat16)
        for family in FAMILIES
        for engine in (*_ENGINES, "reference")
    ]


def _counting(plan: Plan, engine: str) -> dict[str, Any]:
    """Measure T(n) far out and scripted drafts over the random target."""
    target = counting_target(plan.size, dtype=torch.bfloat16, device=plan.device, engine=engine)
    vocab_size = target.shape.vocab_size
    race = []
    for name, growth, siblings in _SHAPES:
        script = ScriptedDrafter(partial(count, vocab_size), plan.alpha, vocab_size, siblings)
        spec = Spec(f"scripted:{growth}", "scripted", growth, name)
        race.append(Contender(spec.text, script, growth, spec))
    result = _measured(target, race, plan, [])
    result["verify_cost_wide"] = _wide(target, plan)
    return result


def _wide(target: Target, plan: Plan) -> dict[str, float]:
    meter = CostMeter(target, list(range(200)), sizes=WIDE_SIZES)
    for _ in range(10 * plan.repeats):
        meter.sample()
    return meter.costs.relative()


def _target(plan: Plan, folder: str, engine: str) -> dict[str, Any]:
    target = Target.load(folder, dtype="bfloat16", device=plan.device, engine=engine)
    race = contenders(target, [Spec.parse("ngram:gamma=4")])
    return _measured(target, race, plan, [parse_peer("hf", target.dtype)])


def _measured(
    target: Target, race: list[Contender], plan: Plan, peers: list[Peer]
) -> dict[str, Any]:
    settings = BenchSettings(max_new_tokens=plan.tokens, repeats=plan.repeats)
    questions = read_prompts(plan.prompts, plan.limit)
    return summarise(measure(target, race, questions, settings, peers=peers), str(plan.prompts))


def _show(result: dict[str, Any]) -> None:
    console = Screen()
    console.show(_case_table(result))
    for part in result["benchmarks"].values():
        console.show(report.table(part))
        if part["peers"]:
            console.show(report.peers_table(part))


def _case_table(result: dict[str, Any]) -> Table:
    found = Table(
        title=f"greedy outputs equal to plain decoding's (+ near-ties) on {result['device']}",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("family", "engine", "dtype", "generate", "chain", "tree", "tree error", ""):
        found.add_column(heading, no_wrap=True)
    for case in result["cases"]:
        outputs = case.get("outputs", {})
        cells = [_same(outputs[name]) if outputs else "-" for name in ("generate", "chain", "tree")]
        error = f"{case['tree_error']:.1e}" if outputs else "-"
        verdict = "FAILED" if case["failures"] else "ok"
        found.add_row(case["family"], case["engine"], case["dtype"], *cells, error, verdict)
    return found


def _same(counts: dict[str, Any]) -> str:
    ties = f"+{counts['near_ties']}" if counts["near_ties"] else ""
    return f"{counts['identical']}/{counts['prompts']}{ties}"


if __name__ == "__main__":
    run(cli)

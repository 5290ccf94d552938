"""Find the first broken link between a drafter's training and its serving.

    T=$(python scripts/fetch_target.py)
    python scripts/doctor.py --target $T --drafter runs/demo/eagle/best
    python scripts/doctor.py --target $T --drafter runs/demo/eagle/best --prompts mine.jsonl --json
    python scripts/doctor.py --target $T --drafter runs/demo/eagle/best --engine vllm

Checks in order, each resting on those before it: fingerprint, tensors, vocabulary, template, dtype,
features, mask, taps, shift, coverage, cache, decoding, losslessness and, with an engine that `make
engines` built, export and engine; docs/doctor.md says what each one looks at. Exit code 0: healthy,
1: a link is broken, 2: bad input.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from console import Dtype, EnginesRoot, Plugins, app, note, progress, run
from drafters.errors import UserError
from drafters.settings import find_config
from drafters.target import Target
from inference.doctor import LINKS, Diagnosis, Finding, examine, patient_of, stored_of
from inference.machine import versions
from inference.prompts import first_turn_ids, read_prompts
from inference.served import Engine, ForeignEngine
from training.commandline import Screen

cli = app(__doc__ or "")

_COLOURS = {"ok": "green", "note": "yellow", "broken": "red"}


@cli.command()
def doctor(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target.")],
    drafter: Annotated[str, typer.Option(help="Folder, hub id or name of the drafter.")],
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL, Parquet: turns, prompt, messages; default: the demo's."),
    ] = None,
    limit: Annotated[int, typer.Option(help="Only the first so many prompts.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Decoded a prompt.")] = 48,
    dtype: Annotated[Dtype, typer.Option(help="What the target computes in.")] = Dtype.float32,
    template_options: Annotated[
        str, typer.Option(help="What the chat template is given: '{\"enable_thinking\": false}'.")
    ] = "{}",
    engine: Annotated[
        ForeignEngine | None, typer.Option(help="Serve the drafter in this engine too.")
    ] = None,
    root: EnginesRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    _plugin: Plugins = None,
) -> int:
    """Find the first broken link between a drafter's training and its serving."""
    options = _options(template_options)
    if engine is None and root is not None:
        raise UserError("--root belongs to an engine: give --engine too")
    server = None if engine is None else Engine.built(engine, root)
    questions = read_prompts(prompts or find_config("configs/prompts/demo.jsonl"), limit)
    stored = stored_of(drafter)
    decider = Target.load(target, dtype=dtype.value)
    patient = patient_of(
        decider,
        stored or drafter,
        first_turn_ids(decider, questions, options),
        new_tokens=max_new_tokens,
        template_options=options,
        engine=server,
    )
    with progress() as bars:
        task = bars.add_task("examining", total=len(LINKS))
        found = examine(patient, lambda _: bars.advance(task))
    if as_json:
        print(json.dumps(found.to_dict() | {"versions": versions()}))
    else:
        console = Screen()
        console.show(_table(found))
    broken = found.broken
    if broken is None:
        note("healthy")
        return 0
    note(f"broken: {broken.link}: {broken.said}")
    note(f"fix: {broken.fix}")
    return 1


def _options(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"--template-options {text!r} is not JSON ({error}): give such as "
            "'{\"enable_thinking\": false}'"
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"--template-options is {text!r}: give a JSON object")
    return found


def _table(found: Diagnosis) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("link", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found")
    for finding in found.findings:
        mark = Text(finding.status, style=_COLOURS.get(finding.status, "dim"))
        table.add_row(finding.link, mark, Text(_said(finding)))
    return table


def _said(finding: Finding) -> str:
    return f"{finding.said}\nfix: {finding.fix}" if finding.fix else finding.said


if __name__ == "__main__":
    run(cli)

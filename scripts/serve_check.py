r"""Serve an exported drafter in vLLM or llama.cpp and compare it with this library.

    make engines
    python scripts/serve_check.py --target $T --drafter runs/demo/eagle/best --engine vllm \
        --prompts configs/prompts/demo.jsonl --limit 16 --gamma 4

Exports the drafter, decodes the same prompts greedily with the engine alone, with the engine and
the drafter, and here; then says whether the engine's texts are equal, in how many rounds it drafted
the same ids (where it tells them), how many drafts each accepted, and what the drafter buys inside
that engine. Engines' speeds are never divided by ours.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from console import Dtype, EnginesRoot, app, note, run
from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.formats.convert import export_drafter
from drafters.formats.served import serving
from drafters.settings import find_config
from drafters.stored import StoredDrafter
from drafters.target import Target
from drafters.whole import check_place, write_text
from inference.machine import versions
from inference.prompts import first_turn_ids, read_prompts
from inference.served import Engine, ForeignEngine, Job
from inference.served.comparison import acceptance, decode, engine_facts, same_drafts, sameness
from training.commandline import Screen

cli = app(__doc__ or "")


@cli.command()
def serve_check(
    target: Annotated[str, typer.Option(help="Folder of the target.")],
    drafter: Annotated[Path, typer.Option(help="Folder of a trained drafter.")],
    engine: Annotated[ForeignEngine, typer.Option(help="Engine that serves it.")],
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL, Parquet: turns, prompt, messages; default: the demo's."),
    ] = None,
    limit: Annotated[int, typer.Option(help="Only the first so many prompts.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Decoded a prompt.")] = 64,
    gamma: Annotated[int, typer.Option(help="Tokens drafted a round, in a chain.")] = 4,
    dtype: Annotated[Dtype, typer.Option(help="Of target and drafter.")] = Dtype.float32,
    allow_loss: Annotated[
        bool, typer.Option(help="Serve it though the format loses some of it.")
    ] = False,
    plain: Annotated[
        bool, typer.Option(help="Decode with the engine alone too: for its texts and its speed.")
    ] = True,
    root: EnginesRoot = None,
    out: Annotated[Path | None, typer.Option(help="Write all figures there as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Serve an exported drafter in an engine and compare it with this library."""
    for name, value in (("limit", limit), ("gamma", gamma), ("max-new-tokens", max_new_tokens)):
        if value < 1:
            raise UserError(f"--{name} is {value}: give 1 or more")
    if out is not None:
        check_place(out, folder=False)
    stored = StoredDrafter.read(drafter)
    way = serving(engine, stored.family)
    server = Engine.built(engine, root)
    questions = read_prompts(prompts or find_config("configs/prompts/demo.jsonl"), limit)
    decider = Target.load(target, dtype=dtype.value, device="cpu")
    ids = first_turn_ids(decider, questions)
    job = Job(decider.folder, ids, max_new_tokens, dtype.value, server.threads)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "drafter"
        lost = export_drafter(drafter, way.format, folder, decider, allow_loss=allow_loss)
        for what in lost:
            note(f"{way.format} loses {what}")
        alone = None
        if plain:
            note(f"{engine}: plain decoding")
            alone = server.run(job)
        note(f"{engine}: with the drafter")
        drafted = server.run(job.drafted(folder, way, gamma))
    note("here")
    model = load_drafter(drafter, decider)
    decoded = decode(decider, model, ids, gamma, max_new_tokens)
    ours = decoded.outputs
    rounds = sum(output.rounds for output in ours)
    texts = [output.ids for output in ours]
    result: dict[str, Any] = {
        "target": target,
        "drafter": str(drafter),
        "family": stored.family,
        "engine": drafted.version,
        "dtype": dtype.value,
        "gamma": gamma,
        "prompts": len(ids),
        "versions": versions(),
        "greedy": sameness(decider, ids, alone.outputs if alone else texts, drafted.outputs),
        "greedy_here": sameness(decider, ids, texts, (alone or drafted).outputs),
        "plain_tokens_per_second": alone and alone.tokens_per_second,
        "speedup": alone and drafted.tokens_per_second / alone.tokens_per_second,
        "drafts": same_drafts(decoded, drafted),
        "served": engine_facts(drafted, gamma),
        "here": {
            "rounds": rounds,
            "drafted": sum(sum(output.drafted) for output in ours),
            "accepted": sum(sum(output.accepted) for output in ours),
            "tau": sum(len(output.ids) - 1 for output in ours) / rounds,
            "acceptance": acceptance(ours, gamma),
        },
    }
    if out is not None:
        write_text(out, json.dumps(result, indent=2) + "\n")
    if as_json:
        print(json.dumps(result))
    else:
        _show(result)
    return 1 if result["greedy"]["different"] else 0


def _show(result: dict[str, Any]) -> None:
    console = Screen()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"{result['family']}, {result['engine']}")
    for name in ("", "tau", "accepted", "drafted", "by position"):
        table.add_column(name, no_wrap=True)
    for name, facts in ((result["engine"], result["served"]), ("here", result["here"])):
        at = facts["acceptance"]
        positions = "not counted" if at is None else " ".join(f"{share:.3f}" for share in at)
        table.add_row(
            name, f"{facts['tau']:.2f}", str(facts["accepted"]), str(facts["drafted"]), positions
        )
    console.show(table)
    if (drafts := result["drafts"]) is not None:
        note(
            f"in {drafts['equal']} of its {drafts['rounds']} rounds it drafted the ids of here "
            f"({drafts['met']} of them came after the same tokens)"
        )
    same = result["greedy"]
    bought = (
        ""
        if result["speedup"] is None
        else (
            f"; {result['speedup']:.2f} times its plain decoding "
            f"({result['plain_tokens_per_second']:.1f} tokens/s, prefills included)"
        )
    )
    note(
        f"{result['engine']}, {result['dtype']}: {same['equal']} of {result['prompts']} greedy "
        f"texts equal {'its plain ones' if bought else 'ours'}, {same['near_ties']} part at a "
        f"near-tie, {same['different']} differ{bought}"
    )


if __name__ == "__main__":
    run(cli)

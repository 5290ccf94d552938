r"""Search the static tree that a drafter should draft in, from how often its guesses are right.

    T=$(python scripts/fetch_target.py)
    python scripts/search_tree.py --target $T --drafter runs/demo/medusa/best \
        --prompts configs/prompts/demo.jsonl --limit 8 --nodes 12 --out runs/tree.json
    python scripts/benchmark.py --target $T --prompts configs/prompts/demo.jsonl \
        --drafter runs/demo/medusa/best:growth=static,tree=runs/tree.json

Lets the target answer the prompts, counts at every depth at which rank the drafter has each token,
and writes the tree of NODES nodes with the most accepted tokens to expect if depths are taken as
independent. Give prompts that the benchmark does not use. How many nodes pay is scripts/tune.py's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from console import Plugins, app, note, progress, run
from drafters.errors import UserError
from drafters.growth import Static
from drafters.growth.ranks import expected, search
from drafters.sampling import Warp
from drafters.target import Target
from drafters.whole import check_place, write_text
from inference.machine import versions
from inference.prompts import first_turn_ids, read_prompts
from inference.ranks import rank_accuracies
from inference.spec import Spec

cli = app(__doc__ or "")

FORMAT_VERSION = 1


@cli.command()
def search_tree(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target.")],
    prompts: Annotated[Path, typer.Option(help="JSONL, Parquet: turns, prompt, messages.")],
    drafter: Annotated[str, typer.Option(help="Folder or name; its shape is not used.")],
    out: Annotated[Path, typer.Option(help="The tree, as growth=static,tree=OUT reads it.")],
    nodes: Annotated[int, typer.Option(help="Drafted nodes of the tree.")] = 12,
    ranks: Annotated[int, typer.Option(help="Likeliest tokens told apart a depth.")] = 10,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="At most this many a prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="Of the answers; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of drawn answers.")] = 0,
    _plugin: Plugins = None,
) -> None:
    """Search the static tree that a drafter should draft in, from how often it is right."""
    for name, value in (("nodes", nodes), ("ranks", ranks), ("max-new-tokens", max_new_tokens)):
        if value < 1:
            raise UserError(f"{name} is {value}: give 1 or more")
    check_place(out, folder=False)
    warp = Warp(temperature)
    spec, questions = Spec.parse(drafter), read_prompts(prompts, limit)
    decider = Target.load(target)
    guesser = spec.load(decider)
    with progress() as bars:
        task = bars.add_task("answers", total=len(questions))
        accuracies = rank_accuracies(
            decider,
            guesser,
            first_turn_ids(decider, questions),
            ranks,
            max_new_tokens=max_new_tokens,
            warp=warp,
            seed=seed,
            each=lambda: bars.advance(task),
        )
    paths = search(accuracies, nodes)
    found = {
        "format_version": FORMAT_VERSION,
        "paths": paths,
        "expected_tau": 1 + expected(paths, accuracies),
        "accuracies": accuracies,
        "drafter": drafter,
        "target": target,
        "prompts": str(prompts),
        "temperature": temperature,
        "seed": seed,
        "versions": versions(),
    }
    write_text(out, json.dumps(found) + "\n")
    shape = Static(tree=paths)
    note(f"{shape.nodes} nodes, {shape.depth} levels, expected tau {found['expected_tau']:.2f}")
    print(f"--drafter {spec.drafter}:growth=static,tree={out}")


if __name__ == "__main__":
    run(cli)

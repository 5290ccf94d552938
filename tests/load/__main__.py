"""Run a long soak or a long generation; see the package."""

import sys
import warnings
from typing import Annotated

import typer

from drafters.registry import build_drafter
from drafters.sampling import Warp
from drafters.target import Target
from inference.compare import first_difference
from inference.spec import Spec
from tests.load.long import PROMPT, answers
from tests.load.soak import Load, soak
from tests.load.ties import excused, strays
from tests.tiny import tiny_target

ROOM = 32 * 2**20  # bytes that a process may grow by: what the allocator keeps


def main(
    seconds: Annotated[float, typer.Option(help="How long.")] = 600,
    rows: Annotated[int, typer.Option(help="Rows of the engine.")] = 64,
    target: Annotated[str, typer.Option(help="A folder; empty: a tiny random target.")] = "",
    drafter: Annotated[str, typer.Option(help="As in a benchmark.")] = "ngram:gamma=4",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    checked: Annotated[int, typer.Option(help="Requests that are decoded alone too.")] = 300,
    tokens: Annotated[int, typer.Option(help="Instead: one generation of so many.")] = 0,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 0,
) -> None:
    """Keep the engine busy; end with 1 if a row is not what it is alone, or memory grows."""
    warnings.simplefilter("ignore")
    decider = Target.load(target) if target else tiny_target(max_position_embeddings=16384)
    spec = Spec.parse(drafter)
    load = Load(decider, spec.load(decider), spec.growth, Warp(temperature))
    sys.exit(_long(load, tokens) if tokens else _soak(load, rows, seconds, seed, checked))


def _soak(load: Load, rows: int, seconds: float, seed: int, checked: int) -> int:
    done = soak(load, rows, seconds, seed, checked)
    typer.echo(f"{done.requests} requests, {done.ended} tokens, {done.released} of others released")
    typer.echo(f"{done.lost} tokens lost, {done.short} requests short of their budget")
    typer.echo(
        f"memory in MiB {[m >> 20 for m in done.memory]}, {done.grown >> 20} in the second half"
    )
    parted = [(s, a) for s in done.sample if (a := load.alone(s.request)) != s.output]
    wrong = [one for one in parted if not excused(load, *one)]
    ties = len(parted) - len(wrong)
    typer.echo(f"{len(done.sample)} rows alone: {ties} part at a near-tie, {len(wrong)} differ")
    return 1 if wrong or done.lost or done.short or done.grown > ROOM else 0


def _long(load: Load, tokens: int) -> int:
    """Decode one long answer greedily with the drafter and without."""
    plainly = build_drafter("none", {}, load.target.shape)
    found = list(answers(load, [load.drafter, plainly], tokens))
    failed = False
    for one in found:
        beyond = one.grown - one.touched
        typer.echo(
            f"{len(one.ids)} tokens in {one.rounds} rounds; cache of {one.reserved >> 20} MiB, "
            f"{one.cache >> 20} at the end; the process grew by {one.grown >> 20} MiB in the last "
            f"nine tenths, of which the cache's own pages up to {one.touched >> 20}"
        )
        failed |= one.cache != one.reserved or beyond > ROOM or len(one.ids) != tokens
    ours, plain = (one.ids for one in found)
    index = first_difference(ours, plain)
    if index is None:
        typer.echo("equal to plain decoding")
        return int(failed)
    wrong = [strays(load.target, [*PROMPT, *ids], len(PROMPT)) for ids in (ours, plain)]
    typer.echo(
        f"parts from plain decoding at token {index}; tokens that are not the best of one forward "
        f"up to a near-tie: {wrong[0]} drafted, {wrong[1]} plain"
    )
    return int(failed or any(wrong))


if __name__ == "__main__":
    typer.run(main)

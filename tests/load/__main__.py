"""Run a long soak or a long generation; see the package."""

import random
import sys
import warnings
from typing import Annotated

import psutil
import typer

from drafters.checkpoint import load_drafter
from drafters.growth import Chain
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from inference.engine import Request
from tests.load.soak import Load, soak
from tests.tiny import tiny_target


def main(
    seconds: Annotated[float, typer.Option(help="How long.")] = 600,
    rows: Annotated[int, typer.Option(help="Rows of the engine.")] = 64,
    target: Annotated[str, typer.Option(help="A folder; empty: a tiny random target.")] = "",
    drafter: Annotated[str, typer.Option(help="A folder or a name.")] = "ngram",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    checked: Annotated[int, typer.Option(help="Requests that are decoded alone too.")] = 300,
    tokens: Annotated[int, typer.Option(help="Instead: one generation of so many.")] = 0,
) -> None:
    """Keep the engine busy; end with 1 if a row is not what it is alone, or memory grows."""
    warnings.simplefilter("ignore")
    decider = Target.load(target) if target else tiny_target(max_position_embeddings=16384)
    load = Load(decider, load_drafter(drafter, decider), Chain(4), Warp(temperature))
    if tokens:
        sys.exit(_long(load, tokens))
    done, numbers = soak(load, rows, seconds)
    ended = sum(map(len, done.outputs))
    typer.echo(f"{len(numbers)} requests, {ended} tokens, memory {[m >> 20 for m in done.memory]}")
    picked = random.Random(0).sample(range(len(numbers)), min(checked, len(numbers)))
    wrong = [i for i in picked if load.alone(done.requests[i], numbers[i]) != done.outputs[i]]
    grown = done.memory[-1] - done.memory[len(done.memory) // 2]
    lost = done.committed - ended - done.released
    typer.echo(f"{len(wrong)} of {len(picked)} differ from themselves alone, {lost} tokens lost")
    typer.echo(f"memory grew by {grown >> 20} MiB in the second half")
    sys.exit(1 if wrong or lost or grown > 32 * 2**20 else 0)


def _long(load: Load, tokens: int) -> int:
    """Decode one long answer greedily with the drafter and without."""
    outputs: list[list[int]] = []
    for name in (None, "none"):
        drafter = load.drafter if name is None else load_drafter(name, load.target)
        one = Load(load.target, drafter, load.growth, Warp())
        decoder = one.decoder(1, tokens + 8)
        decoder.admit({0: Request([1, 2, 3], tokens, RowRandom(0))})
        before, longest = psutil.Process().memory_info().rss, 0
        while decoder.running:
            decoder.round()
            longest = max(longest, psutil.Process().memory_info().rss)
        row = decoder.rows[0]
        assert row is not None
        outputs.append(list(row.ids))
        typer.echo(f"{len(row.ids)} tokens, memory grew by {(longest - before) >> 20} MiB")
    same = outputs[0] == outputs[1]
    typer.echo("equal to plain decoding" if same else "NOT equal to plain decoding")
    return 0 if same else 1


if __name__ == "__main__":
    typer.run(main)

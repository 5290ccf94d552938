"""Every linear map of a target, cold, by the number of tokens: our kernel and torch's, in turns;
and how far a step is from what reading the weights alone would take.

python -m tests.load.maps --target T --tokens 1 8 64 --repeats 5
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from drafters.linear import FrozenLinear
from drafters.target import Target
from inference.meter import CostMeter

_READ = 2**28  # bytes of a tensor no cache holds


def main() -> None:
    """Print milliseconds for all maps together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    target = Target.load(options.target, dtype=getattr(torch, options.dtype))
    modules = [m for m in target.model.modules() if isinstance(m, torch.nn.Linear)]
    weights = [module.weight.detach() for module in modules]
    ours = [FrozenLinear([weight]) for weight in weights]
    kinds: dict[str, list[Callable[[Tensor], Tensor]]] = {
        "ours": list(ours),
        "F.linear": [lambda x, w=weight: F.linear(x, w) for weight in weights],
    }
    table = Table(
        "tokens", *kinds, title=f"{len(weights)} maps, {options.dtype}, median (least) ms"
    )
    with torch.inference_mode():
        for tokens in options.tokens:
            given = [torch.randn(tokens, w.shape[1], dtype=w.dtype) for w in weights]
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for repeat in range(options.repeats + 1):
                for kind, maps in kinds.items():
                    start = time.perf_counter()
                    for run, x in zip(maps, given, strict=True):
                        run(x)
                    if repeat:  # the first warms up
                        times[kind].append(1e3 * (time.perf_counter() - start))
            row = (f"{median(taken):.1f} ({min(taken):.1f})" for taken in times.values())
            table.add_row(str(tokens), *row)
    console = Console()
    console.print(table)
    console.print(_floor(target, sum(weight.nbytes for weight in weights), options.repeats))


def _floor(target: Target, size: int, repeats: int) -> str:
    """Return what a step of one token takes beside the reading of its weights, in turns."""
    meter = CostMeter(target, list(range(200)), sizes=(1,))
    memory, reading = torch.zeros(_READ // 4), list[float]()
    for _ in range(4 * repeats):
        meter.sample()
        start = time.perf_counter()
        memory.sum()
        reading.append(time.perf_counter() - start)
    step, rate = median(meter.times[1]), _READ / median(reading)
    floor = 1e3 * size / rate
    return (
        f"A step of one token over 200: {1e3 * step:.1f} ms; its weights, {size / 1e6:.0f} MB, are "
        f"read in {floor:.1f} ms at the {rate / 1e9:.1f} GB/s at which torch sums a tensor."
    )


if __name__ == "__main__":
    main()

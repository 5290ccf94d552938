"""Plain decoding and drafts by rows and cached tokens: steps, memory, speed-up.

python -m tests.load.contexts --target T --drafter D:growth=cost_aware --rows 1 --contexts 200 4000
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from drafters.checkpoint import parts_of
from drafters.target import Target
from inference.bench import BenchSettings, Measurement, contenders, measure
from inference.prompts import Prompt, first_turn_ids
from inference.spec import Spec
from inference.summary import summarise
from training.records import read_records

_WIDTH = 160
_ASK = "Say this again in other words, all of it:\n"


def main() -> None:
    """Print a table, a line for every number of rows and context."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", action="append", default=[])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[200, 1000, 4000, 8000])
    parser.add_argument("--prompts", type=int, default=1, help="at least so many a line")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--chats", default="configs/chats")
    options = parser.parse_args()
    target = Target.load(options.target)
    specs = [Spec.parse(text) for text in options.drafter]
    table = Table("rows", "cached", "plain", "T(4)", "T(8)", "cache", "grown", box=SIMPLE_HEAD)
    for spec in specs:
        shape = spec.text.partition(":")[2]
        names = "+".join(Path(part).name for part in parts_of(spec.drafter))
        table.add_column(f"{names}\n{shape}")
    progress = Console(stderr=True, width=_WIDTH)
    for rows in options.rows:
        for context in options.contexts:
            settings = BenchSettings(options.max_new_tokens, rows=rows, repeats=1, warmup=1)
            count = -(-options.prompts // rows) * rows
            prompts = prompts_of(target, options.chats, context, count)
            before = psutil.Process().memory_info().rss
            measured = measure(target, contenders(target, specs), prompts, settings)
            grown = psutil.Process().memory_info().rss - before
            cells = [str(rows), *_cells(measured, settings, grown)]
            table.add_row(*cells)
            progress.print("  ".join(cells))  # a stop loses no line
    Console(width=_WIDTH).print(table)


def prompts_of(target: Target, chats: str, context: int, count: int) -> list[Prompt]:
    """Return questions about texts of chats, so long that answers begin after `context` tokens."""
    records = read_records(chats)
    ids = [int(token) for one in records if one.ids is not None for token in one.ids]
    empty = len(first_turn_ids(target, [Prompt("", "", (_ASK,))])[0])
    width = context - empty
    texts = [target.tokenizer.decode(ids[i * width : (i + 1) * width]) for i in range(count)]
    return [Prompt(str(i), "long", (_ASK + text,)) for i, text in enumerate(texts)]


def _cells(measured: Measurement, settings: BenchSettings, grown: int) -> Sequence[str]:
    result = summarise(measured, "chats")
    relative, shape = result["verify_cost"], measured.target.shape
    columns = max(map(len, measured.ids)) + settings.max_new_tokens
    width = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    size = settings.rows * columns * width
    cells = [
        str(measured.context),
        f"{result['baseline']['tokens_per_second']:.1f}/s",
        f"{relative['4']:.2f}",
        f"{relative['8']:.2f}",
        f"{size * measured.target.dtype.itemsize >> 20} MiB",
        f"{grown >> 20} MiB",
    ]
    for one in result["drafters"]:
        ends = one["speedup_interval"]
        interval = "" if ends is None else f" [{ends[0]:.2f}, {ends[1]:.2f}]"
        cells.append(f"{one['speedup']:.2f}{interval}, tau {one['tau']:.2f}")
    return cells


if __name__ == "__main__":
    main()

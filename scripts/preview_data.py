"""Look at what a run would learn from: in seconds, without weights, before any training.

    T=$(python scripts/fetch_target.py)
    python scripts/preview_data.py --target $T --data configs/chats
    python scripts/preview_data.py --target $T --data chats.jsonl --show 1 --positions 40
    python scripts/preview_data.py --target $T --data hub:OWNER/NAME data.max_length=2048

Green is learned, dim is only read. Give data.key=value as to training/train_*.py.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from console import app, run
from drafters.errors import UserError
from drafters.settings import load
from training.commandline import Screen
from training.examples import Example, Report, first_tokens, make_examples, pack, split
from training.lesson_settings import DataSettings
from training.parts import with_stored_options
from training.preview import coloured, coverages, first_target, kept_always, positions
from training.reader import WeightlessReader
from training.records import read_records

cli = app(__doc__ or "")


@cli.command()
def preview_data(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target.")],
    data: Annotated[str, typer.Option(help="Chats, as data.path of a training run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[data.KEY=VALUE]...", help="As in training.")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Chats that are shown in colour.")] = 2,
    table: Annotated[
        int, typer.Option("--positions", min=0, help="Positions shown one by one.")
    ] = 12,
    vocabularies: Annotated[
        str, typer.Option(help="Sizes of draft vocabularies to look at.")
    ] = "1024,2048,4096,8192,16384,32768",
    gamma: Annotated[int, typer.Option(min=1, help="Chain that the ceiling on tau is for.")] = 4,
) -> None:
    """Show the chats as they would be learned, what is dropped and why, and what ids cover."""
    sizes = _sizes(vocabularies)
    given = [f"path={data}", *(_own(override) for override in overrides or [])]
    settings = with_stored_options(load(DataSettings, [], given))
    records = read_records(settings.path, settings.split)
    reader = WeightlessReader.load(target)
    examples, report = make_examples(records, reader, settings)
    screen = Screen(highlight=False)
    for example in examples[:show]:
        screen.rule(f"{example.id}: {len(example)} tokens, {example.supervised} learned")
        colours = screen.color_system is not None
        screen.print(coloured(example, reader.tokenizer, colours=colours), soft_wrap=True)
        if table > 0:
            start = max(0, first_target(example) - table // 4)
            screen.print(positions(example, reader.tokenizer, start, table))
    screen.rule("all chats")
    for line in _summary(report, examples, settings):
        screen.print(line, soft_wrap=True)
    screen.print(_covered(reader, examples, settings, sizes, gamma))


def _own(override: str) -> str:
    if not override.startswith("data."):
        raise UserError(f"{override!r}: only data.key=value can be set here")
    return override.removeprefix("data.")


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--vocabularies is {text!r}: give sizes such as 4096,8192") from None
    if min(sizes) < 1:
        raise UserError(f"--vocabularies is {text!r}: give sizes of 1 or more")
    return sizes


def _summary(report: Report, examples: list[Example], settings: DataSettings) -> list[str]:
    training, held_out = _sides(examples, settings)
    lengths = sorted(len(example) for example in examples)
    lines = [
        f"{report.read} chats read, {report.kept} examples kept, {report.shortened} shortened to "
        f"{settings.max_length} tokens, {report.cut} with an answer that a length limit ended",
        f"{report.tokens} tokens, {report.supervised} learned "
        f"({report.supervised / report.tokens:.1%}); lengths {lengths[0]} to {lengths[-1]}, half "
        f"of them up to {lengths[len(lengths) // 2]}",
        f"{len(training)} to learn from, {len(held_out)} held out",
        f"template options: {settings.template_options or 'none'}",
    ]
    if settings.pack:
        rows = len(pack(training, settings.max_length))
        lines.append(f"packed into {rows} rows of up to {settings.max_length} tokens")
    dropped = [f"dropped: {count} {reason}" for reason, count in report.dropped.most_common()]
    return lines + (dropped or ["dropped: none"])


def _sides(examples: list[Example], settings: DataSettings) -> tuple[list[Example], list[Example]]:
    training, held_out = split(examples, settings.held_out)
    return first_tokens(training, settings.tokens), held_out


def _covered(
    reader: WeightlessReader,
    examples: list[Example],
    settings: DataSettings,
    sizes: list[int],
    gamma: int,
) -> Table:
    training, held_out = _sides(examples, settings)
    always = kept_always(reader.tokenizer, set(reader.eos_ids), training)
    found = coverages(training, held_out, reader.shape.vocab_size, always, sizes)
    table = Table("draft vocabulary", "of training", "of held-out (ceiling on alpha)", "on tau")
    for row in found:
        ceiling = f"{row.ceiling(gamma):.2f} of {gamma + 1}"
        table.add_row(str(row.size), f"{row.training:.2%}", f"{row.held_out:.2%}", ceiling)
    return table


if __name__ == "__main__":
    run(cli)

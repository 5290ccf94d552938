r"""Run the target over a training set once and keep its states: training then never runs it again.

    T=$(python scripts/fetch_target.py)
    python scripts/store_features.py eagle --config configs/drafters/eagle3.yaml target=$T \
        data.path=configs/chats features.store=runs/features
    python scripts/store_features.py eagle --config configs/smoke/eagle.yaml target=$T \
        data.path=configs/chats data.tokens=4000 features.store=/tmp/features

Family, config and settings are those of the training run that is to read them; give it the same
features.store. The same command goes on where a killed one stopped. A training run with
features.store fills the folder too; scripts/make_chats.py --features does as it writes the chats.
With features.engine=vllm that engine holds the target and makes the states; it is made by `make
engines`. spread.device_map puts the target's layers on several devices, or partly on the disk
(docs/scale.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console import app, note, progress, run
from drafters.errors import UserError
from drafters.settings import find_config, load
from training.features import Lessons
from training.options import TrainSettings
from training.parts import prepare

cli = app(__doc__ or "")


@cli.command()
def store_features(
    family: Annotated[str, typer.Argument(help="Drafter family that will read them.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings of the training run.")] = None,
) -> None:
    """Keep the target's states over a training set, so that training need not run it."""
    files = [] if config is None else [find_config(config)]
    # nothing is written there; the run that reads the features has its own
    settings = load(TrainSettings, files, ["output=unused", *(overrides or [])])
    if not settings.features.store:
        raise UserError("features.store is empty: give the folder that keeps the features")
    parts = prepare(family, settings)
    for line in parts.notes:
        note(line)
    sides = parts.lessons, parts.held_out
    with progress() as bars:
        task = bars.add_task("batches", total=sum(map(len, sides)))
        for side in sides:
            try:
                for index in range(len(side)):
                    if not side.is_stored(index):
                        side.make(index)
                    bars.advance(task)
            finally:
                side.flush()
    note(_summary(parts.lessons, settings.features.store))
    print(settings.features.store)


def _summary(lessons: Lessons, folder: str) -> str:
    files = list(Path(folder).glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    tokens = sum(len(example) for example in lessons.examples)
    return f"{tokens} tokens to learn from; {len(files)} shards, {size / 2**20:.0f} MiB"


if __name__ == "__main__":
    run(cli)

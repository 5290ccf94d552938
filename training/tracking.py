"""Trackers: where a run's metrics go, by accelerate.

Fixed names. Held-out chats: `loss` (nats a prediction), `agreement/D` (most likely token equals the
target's), `overlap/D` (sum of min(p, q) at temperature 1), teacher-forced; `target_agreement` and
`target_overlap`, the same of a target that learns along against the frozen one. The engine on
held-out prompts: `tau`, `alpha/D` (accepted / attempted at depth D), `survival/D` (rounds that
accepted depth D), all temperatures together; `tau/T` at temperature T, with `tau/T/low` and
`tau/T/high`, a 95% interval over prompts. Training: `train/loss`, `train/agreement/D`,
`learning_rate`, `tokens_per_second`, `skipped_steps`, `epoch`, `memory` (GiB). Tables: `samples`
(texts, accepted drafts in brackets) at every evaluation, `benchmark` at the end where it is asked
for.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from drafters.errors import UserError
from drafters.whole import write_text
from training.options import TrackingSettings

METRICS = "metrics.jsonl"


class JsonlTracker(GeneralTracker):
    """Appends one JSON object a call to a file.

    Args:
        file: made with the first line; a resumed run appends, see rewind.
    """

    name = "jsonl"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, file: Path) -> None:
        """Keep the path."""
        super().__init__()
        self.file = file

    def start(self) -> None:
        """Open nothing: every line is written and closed, so that a kill loses none."""

    @property
    def tracker(self) -> Path:
        """Return the file."""
        return self.file

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Leave the settings to settings.yaml, which lies beside the file."""

    def log(self, values: dict[str, Any], step: int | None = None, **_kwargs: Any) -> None:
        """Append one line.

        Raises:
            UserError: if the disk does not take it.
        """
        try:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            raise UserError(
                f"{self.file} cannot be written ({error.strerror}): make room; what was saved "
                "stays, and resume=true goes on"
            ) from error


def rewind(output: Path, step: int) -> None:
    """Drop what a killed run wrote of later steps, which come again, and a line it had begun."""
    file = output / METRICS
    if not file.exists():
        return
    kept: list[str] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    write_text(file, "".join(kept))


def trackers_of(settings: TrackingSettings, output: Path) -> list[Any]:
    """Return what Accelerator's `log_with` takes.

    Raises:
        UserError: if tensorboard is asked for and not installed.
    """
    known: dict[str, Any] = {"jsonl": JsonlTracker(output / METRICS)}
    if "tensorboard" in settings.trackers:
        try:
            import tensorboard  # noqa: F401 - only whether it is there
        except ImportError:
            raise UserError(
                "tracking.trackers has tensorboard, which is not installed: pip install "
                "tensorboard, or leave it out"
            ) from None
    return [known.get(name, name) for name in settings.trackers]


def start(
    accelerator: Accelerator,
    settings: TrackingSettings,
    output: Path,
    values: Mapping[str, object],
) -> None:
    """Start the trackers with the run's settings (nested ones under dotted names)."""
    options: dict[str, dict[str, Any]] = {}
    if "wandb" in settings.trackers:
        options["wandb"] = {"dir": str(output), "name": output.name, "mode": _wandb_mode()}
    accelerator.init_trackers(settings.project, _flat(values), options)


def log_table(
    accelerator: Accelerator,
    name: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    step: int,
) -> None:
    """Send a table to every tracker in the form that it shows: a table, Markdown or a list."""
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            tracker.log_table(name, columns=[*columns], data=[[*row] for row in rows], step=step)
        elif tracker.name == "jsonl":
            tracker.log({name: [dict(zip(columns, row, strict=True)) for row in rows]}, step=step)
        else:
            tracker.log({name: _markdown(columns, rows)}, step=step)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _wandb_mode() -> str:
    """Return online only where somebody is logged in and nobody said otherwise."""
    import wandb

    if mode := os.environ.get("WANDB_MODE"):
        return mode
    return "online" if wandb.login(prompt=False) else "offline"


def _flat(values: Mapping[str, object], above: str = "") -> dict[str, str | int | float | bool]:
    """Return nested settings as dotted names with values that every tracker takes."""
    flat: dict[str, str | int | float | bool] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{above}{key}."))
        else:
            plain = isinstance(value, str | int | float | bool)
            flat[f"{above}{key}"] = value if plain else json.dumps(value)
    return flat

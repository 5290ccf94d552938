"""Projection report: memory, disk and hours as tables, and what they assume."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from training.projection import WAYS

_MEMORY = {
    "drafter": "drafter, gradients, moments",
    "states_of_a_batch": "the target's states of a batch",
    "kept_for_backward": "kept for the backward",
    "teacher_logits": "the teacher's logits",
    "embedding_and_head": "embedding and head of the target",
    "without_target": "in all, states from a store or a serving engine",
    "target": "the target's weights",
    "target_forward": "the target's forward",
    "with_target": "in all, target whole on every device",
    "target_spread": "in all, target spread over all devices",
}
_HOURS = {
    "answers": "answers, written by the target",
    "features": "states, forward over all chats",
    "training": "drafter, all passes",
}


def tables(found: Mapping[str, Any], plan: str) -> list[Table]:
    """Return memory of a device, and disk and hours of the project."""
    target, drafter = found["target"], found["drafter"]
    title = (
        f"{plan}\ntarget {_billions(target['parameters'])} ({_billions(target['active'])} a token),"
        f" drafter {_billions(drafter['parameters'])}, {drafter['vocabulary']} ids"
    )
    memory = _table(title, "a device", "GB")
    for key, label in _MEMORY.items():
        size = f"{found['memory'][key] / 1e9:.1f}"
        if not found["fits"].get(key, True):
            size += " too much"
        memory.add_row(label, size, end_section=key in WAYS)
    project = _table("", "the project", "")
    disk = found["disk"]
    project.add_row("disk for states, a million tokens", f"{disk['gb_a_million_tokens']:.1f} GB")
    project.add_row("disk for states", f"{disk['gb'] / 1e3:.2f} TB", end_section=True)
    for key, label in _HOURS.items():
        hours = found["hours"][key]
        project.add_row(label, "does not fit" if hours is None else f"{hours:.1f} h")
    return [memory, project]


def verdict(found: Mapping[str, Any], devices: int) -> str:
    """Return where the target itself fits, in a line."""
    span, copies = (
        found["fits"][key] for key in ("devices_a_copy_of_the_target", "copies_of_the_target")
    )
    return f"a copy of the target takes {span} of the {devices} devices: {copies} write answers"


def calibration(lines: Sequence[Mapping[str, Any]], rate: float, name: str) -> Table:
    """Return predicted against measured speeds of runs on this machine."""
    found = Table(
        title=f"tokens a second here, predicted from {rate / 1e9:.0f} GFLOP/s of {name}",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("run", "pass"):
        found.add_column(heading)
    for heading in ("predicted", "measured", "off"):
        found.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        speeds = f"{line['predicted']:.0f}", f"{line['measured']:.0f}"
        found.add_row(line["run"], line["pass"], *speeds, f"{line['off']:+.0%}")
    return found


def _table(title: str, what: str, unit: str) -> Table:
    found = Table(title=title or None, box=SIMPLE_HEAD, pad_edge=False)
    found.add_column(what, no_wrap=True)
    found.add_column(unit, justify="right", no_wrap=True)
    return found


def _billions(count: float) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"

"""Report: benchmark.json on disk, and the table that a person reads."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from drafters.errors import UserError

FILE = "benchmark.json"
_HEADINGS = (
    "tau",
    "alpha",
    "speed-up",
    "95%",
    "pred.",
    "even",
    "c",
    "time",
    "same",
    "looped",
    "no loops",
)


def write(result: Mapping[str, Any], folder: str | Path, name: str = FILE) -> Path:
    """Write benchmark.json, or another file of results; a kill leaves the old file or the new one.

    Args:
        result: from inference.summary.summarise.
        folder: made if needed.
        name: of the file.

    Raises:
        UserError: if the folder cannot be written.
    """
    path = Path(folder) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}.tmp")
        new.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
        new.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): give --out") from error
    return path


def table(result: Mapping[str, Any]) -> Table:
    """Return one line a drafter, plain decoding first; fits 120 columns."""
    settings, target = result["settings"], result["target"]
    title = (
        f"{target['title']}, {target['dtype']}, T={settings['temperature']:g}, "
        f"{settings['prompts']} prompts x {settings['max_new_tokens']} tokens, "
        f"{settings['rows']} a batch, {settings['repeats']} repeats"
    )
    found = Table(
        title=title,
        caption=_caption(result),
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    found.add_column("drafter", no_wrap=True)
    found.add_column("shape", no_wrap=True)
    for heading in _HEADINGS:
        found.add_column(heading, justify="right", no_wrap=True)
    plain = result["baseline"]
    looped = _percent(plain["looped_share"])
    found.add_row("none", "", "1.00", "", "1.00", *[""] * 6, looped, "1.00")
    for one in result["drafters"]:
        found.add_row(*_row(one, settings["prompts"], _label(one, result["drafters"])))
        for member in one["members"]:
            found.add_row(*_member_row(member))
    return found


def peers_table(result: Mapping[str, Any]) -> Table:
    """Return one line a peer: its speed, and our plain decoding's over it."""
    found = Table(
        title="other libraries on the same prompts, in the same turns; never multiplied",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    found.add_column("peer", no_wrap=True)
    for heading in ("tokens/s", "over hf", "none over it", "with prefill", "same"):
        found.add_column(heading, justify="right", no_wrap=True)
    prompts = result["settings"]["prompts"]
    for one in result["peers"]:
        found.add_row(
            one["name"],
            _number(one["tokens_per_second"], 1),
            _estimate(one["over_hf"]),
            _estimate(one["none_over_it"]),
            _estimate(one["none_over_it_with_prefill"]),
            "" if one["identical"] is None else f"{one['identical']}/{prompts}",
        )
    return found


def _estimate(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return ""
    interval = one["interval"]
    return _number(one["value"]) + (f" {interval[0]:.2f}-{interval[1]:.2f}" if interval else "")


def _row(one: Mapping[str, Any], prompts: int, label: str) -> list[str]:
    shape = "/".join(_plain(value) for value in one["shape"].values())
    interval, share = one["speedup_interval"], one["time_share"]
    same = "" if one["identical"] is None else f"{one['identical']}/{prompts}"
    if one["near_ties"]:
        same += f"+{one['near_ties']}"
    return [
        label,
        f"{one['growth']} {shape}{_drawn(one)}",
        _number(one["tau"]),
        _number(one["alpha"]),
        _number(one["speedup"]),
        "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}",
        _predicted(one),
        _number(one["break_even_tau"]),
        _number(one["cost_ratio"], 3),
        f"{_percent(share['draft'])} {_percent(share['verify'])}",
        same,
        _percent(one["looped_share"]),
        _number(one["without_loops"]["speedup"]),
    ]


def _member_row(member: Mapping[str, Any]) -> list[str]:
    """Return what a part of a joint drafter would have got alone, and the time that it took."""
    row = dict.fromkeys(("drafter", "shape", *_HEADINGS), "")
    alone = 1 + member["accepted"] / member["rounds"] if member["rounds"] else None
    row |= {"drafter": f"  {member['method']}", "shape": "alone, in the same rounds"}
    row |= {"tau": _number(alone), "time": _percent(member["time_share"])}
    return list(row.values())


def _drawn(one: Mapping[str, Any]) -> str:
    """Return how sampled drafts were judged; argmax and top-k go without saying."""
    return f" sampled {one['verify_mode']}" if one["draft_mode"] == "sampled" else ""


def _label(one: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """Return the method, with the folder where several of one method run."""
    method, names = _method(one), [_method(other) for other in others]
    folders = {o["checkpoint"] for o, name in zip(others, names, strict=True) if name == method}
    name = method if len(folders) == 1 else f"{method} {one['checkpoint']}"
    return name if one["lossless"] else f"{name} LOSSY"


def _method(one: Mapping[str, Any]) -> str:
    return "+".join(member["method"] for member in one["members"]) or one["method"]


def _caption(result: Mapping[str, Any]) -> str:
    plain, costs = result["baseline"], result["verify_cost"]
    speed = plain["tokens_per_second"]
    return (
        f"none: {_number(speed, 1)} tokens/s, {_number(plain['check']['share'])} of 1/T(1). "
        f"T(n)/T(1): {', '.join(f'{n}: {value:.2f}' for n, value in costs.items())}. "
        "shape: gamma, children a depth, or nodes/width/depth. tau counts the bonus, not the "
        "prefill's token. pred.: speed-up that this run's costs predict, then that of stored ones. "
        "even: the tau from which a shape pays. c: one depth's drafting over T(1). time: share of "
        "drafting, of verifying. same: outputs equal to none's (+ near-ties). no loops: speed-up "
        "outside repeated 4-grams."
    )


def _predicted(one: Mapping[str, Any]) -> str:
    """Return the prediction of this run's costs, and that of costs measured before if there are."""
    found = _number(one["predicted_speedup"])
    stored = one["forecast_speedup"]
    return found if stored is None else f"{found} {stored:.2f}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _plain(value: object) -> str:
    return ".".join(map(str, value)) if isinstance(value, tuple | list) else str(value)

"""Report: benchmark.json on disk, and the table that a person reads."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from rich.box import SIMPLE_HEAD
from rich.table import Table

from drafters.errors import UserError
from drafters.growth.label import shape_label
from drafters.untrusted import read_json
from drafters.whole import write_text

FILE = "benchmark.json"
_LARGEST = 2**28  # bytes: thousands of prompts, round by round
TIES = "ties/k"  # bfloat16 only: float32 has next to none
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
    TIES,
    "dist-4",
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
    write_text(path, json.dumps(result, indent=2, allow_nan=False) + "\n")
    return path


def read(place: str | Path) -> dict[str, Any]:
    """Return what scripts/benchmark.py wrote.

    Args:
        place: its folder, or the file itself.

    Raises:
        UserError: if there is none, or it is no benchmark.json of a version that is known.
    """
    path = Path(place)
    path = path / FILE if path.is_dir() else path
    try:
        found = read_json(path, _LARGEST)
    except UserError as error:
        raise UserError(f"{path} is no {FILE} ({error}): give its folder") from error
    if not isinstance(found, dict) or not {"drafters", "settings", "baseline"} <= found.keys():
        raise UserError(f"{path} is no {FILE}: give what scripts/benchmark.py wrote")
    if found.get("format_version") != 1:
        raise UserError(f"{path} has format_version {found.get('format_version')}, 1 is known")
    return found


@contextmanager
def as_written(*places: str | Path) -> Iterator[None]:
    """Blame a file that was changed by hand for what cannot be made of it.

    Args:
        places: as they were given to `read`.

    Raises:
        UserError: if what is done meanwhile misses something, or meets another kind of value.
    """
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, TemplateError) as error:
        named = " or ".join(map(str, places))
        raise UserError(
            f"{named} is not as scripts/benchmark.py writes it ({type(error).__name__}: {error}): "
            "measure again"
        ) from error


def table(result: Mapping[str, Any]) -> Table:
    """Return one line a drafter, plain decoding first."""
    settings, target = result["settings"], result["target"]
    title = (
        f"{target['title']}, {target['dtype']}, {target['engine']}, "
        f"T={settings['temperature']:g}, "
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
    shown = [h for h in _HEADINGS if h != TIES or target["dtype"] == "bfloat16"]
    for heading in shown:
        found.add_column(heading, justify="right", no_wrap=True)
    plain = {"tau": "1.00", "speed-up": "1.00", "no loops": "1.00"}
    plain["dist-4"] = _percent(result["baseline"].get("distinct_4"))
    plain["looped"] = _percent(result["baseline"]["looped_share"])
    found.add_row("none", "", *(plain.get(heading, "") for heading in shown))
    for one in result["drafters"]:
        cells = _cells(one, settings["prompts"])
        shape = shape_label(one["growth"], one["shape"], one["nodes"])
        named = label(one, result["drafters"]), f"{shape}{drawn(one)}"
        found.add_row(*named, *(cells[heading] for heading in shown))
        for member in one["members"]:
            named, cells = (f"  {member['method']}", "alone"), _member_cells(member)
            found.add_row(*named, *(cells.get(heading, "") for heading in shown))
    return found


def peers_table(result: Mapping[str, Any]) -> Table:
    """Return one line a peer: its speed, and our plain decoding's over it."""
    found = Table(
        title="others on the same prompts, in the same turns; never multiplied",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    found.add_column("peer", no_wrap=True)
    for heading in ("tokens/s", "over its plain", "none over it", "with prefill", "same"):
        found.add_column(heading, justify="right", no_wrap=True)
    prompts = result["settings"]["prompts"]
    for one in result["peers"]:
        found.add_row(
            one["name"],
            _number(one["tokens_per_second"], 1),
            _estimate(one["over_its_plain"]),
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


def _cells(one: Mapping[str, Any], prompts: int) -> dict[str, str]:
    """Return what stands under each heading."""
    interval, share, ties = one["speedup_interval"], one["time_share"], one["near_ties"]
    same = "" if one["identical"] is None else f"{one['identical']}/{prompts}"
    rate = one["near_ties_per_thousand"]
    return {
        "tau": _number(one["tau"]),
        "alpha": _number(one["alpha"]),
        "speed-up": _number(one["speedup"]),
        "95%": "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}",
        "pred.": _predicted(one),
        "even": _number(one["break_even_tau"]),
        "c": _number(one["cost_ratio"], 3),
        "time": f"{_percent(share['draft'])} {_percent(share['verify'])}",
        "same": same + (f"+{ties}" if ties else ""),
        TIES: "" if rate is None else _number(rate, 1),
        "dist-4": _percent(one.get("distinct_4")),
        "looped": _percent(one["looped_share"]),
        "no loops": _number(one["without_loops"]["speedup"]),
    }


def _member_cells(member: Mapping[str, Any]) -> dict[str, str]:
    """Return what a part of a joint drafter would have got alone, and the time that it took."""
    alone = 1 + member["accepted"] / member["rounds"] if member["rounds"] else None
    return {"tau": _number(alone), "time": _percent(member["time_share"])}


def drawn(one: Mapping[str, Any]) -> str:
    """Return how sampled drafts were judged; argmax and top-k go without saying."""
    return f" sampled {one['verify_mode']}" if one["draft_mode"] == "sampled" else ""


def label(one: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
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
        f"none: {_number(speed, 1)} tokens/s, {_number(plain['check']['share'])} of 1/T(1)"
        f"{'' if plain['check']['judged'] else ' (not judged: a short run, or a toy target)'}. "
        f"T(n)/T(1): {', '.join(f'{n}: {value:.2f}' for n, value in costs.items())}. "
        "shape: gamma, children a depth, or nodes/width/depth. tau counts the bonus, not the "
        "prefill's token. pred.: speed-up that this run's costs predict, then that of stored ones. "
        "even: the tau from which a shape pays. c: one depth's drafting over T(1). time: share of "
        "drafting, of verifying. same: outputs equal to none's (+ near-ties). "
        + ("ties/k: near-ties in 1,000 tokens. " if result["target"]["dtype"] == "bfloat16" else "")
        + "dist-4: share of 4-grams that are new in their output. "
        + "no loops: speed-up outside repeated 4-grams."
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

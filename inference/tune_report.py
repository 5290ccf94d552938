"""Tune report: the table of what shapes should bring, and what the best of them did bring."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from drafters.checkpoint import parts_of
from drafters.growth.label import shape_label
from inference.spec import Spec

FILE = "tune.json"


def table(result: Mapping[str, Any], top: int) -> Table:
    """Return the best shapes of every load, the best first; what was tried stands beside.

    Args:
        result: tune.json.
        top: shapes a load.
    """
    target = result["target"]
    found = Table(
        title=f"{target['title']}, {target['dtype']}: speed-ups that costs and acceptance predict",
        caption=(
            "shape: gamma, or nodes/width/depth. tau: emitted tokens a round, the bonus counted. "
            "predicted: tau over the round that stored costs add up. measured: of --try, against "
            "none in the same turns. Below 1 speculation does not pay."
        ),
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("rows", "context", "T"):
        found.add_column(heading, justify="right", no_wrap=True)
    for heading in ("drafter", "shape"):
        found.add_column(heading, no_wrap=True)
    for heading in ("tau", "predicted", "measured", "95%"):
        found.add_column(heading, justify="right", no_wrap=True)
    for load in result["loads"]:
        _add_load(found, load, top)
    return found


def advice(result: Mapping[str, Any]) -> list[str]:
    """Return a line a load: the drafter to give to benchmark.py or generate.py, or that none pays.

    What was tried decides where something was; what is predicted decides elsewhere.
    """
    lines: list[str] = []
    for load in result["loads"]:
        tried = [(one["measured"], one["spec"]) for one in load["tried"] if one["measured"]]
        found = tried or [(one["predicted"], one["spec"]) for one in load["shapes"]]
        # the first of several that are as good: the line that the table shows first
        value, spec = max(found, key=lambda pair: pair[0], default=(0.0, ""))
        how = "measured" if tried else "predicted"
        rows = "1 row" if load["rows"] == 1 else f"{load['rows']} rows"
        where = f"{rows}, context {load['context']}, T={load['temperature']:g}"
        best = f"--drafter {spec}" if value > 1 else "speculation does not pay"
        lines.append(f"{where}: {best} ({how} {value:.2f})")
        if load["experts_hit"]:
            hit = ", ".join(f"{n}: {count:.1f}" for n, count in load["experts_hit"].items())
            lines.append(f"{where}: experts hit a layer by n tokens a row: {hit}")
    return lines


def _add_load(found: Table, load: Mapping[str, Any], top: int) -> None:
    measured = {one["spec"]: one for one in load["tried"]}
    rows = [(one["spec"], one["tau"], one["predicted"]) for one in load["shapes"][:top]]
    known = {spec for spec, _, _ in rows}
    predicted = {one["spec"]: one["predicted"] for one in load["shapes"]}
    rows += [
        (spec, one["tau"], predicted.get(spec))
        for spec, one in measured.items()
        if spec not in known
    ]
    for number, (spec, tau, value) in enumerate(rows):
        first = number == 0
        where = (f"{load['rows']}", f"{load['context']}", f"{load['temperature']:g}")
        tried = measured.get(spec, {})
        found.add_row(
            *(where if first else ("", "", "")),
            *labels(spec),
            _number(tau),
            _number(value),
            _number(tried.get("measured")),
            _interval(tried.get("interval")),
            end_section=number == len(rows) - 1,
        )


def labels(text: str) -> tuple[str, str]:
    """Return a drafter's name (the end of its folder's) with its options, and its shape."""
    spec = Spec.parse(text)
    name = "+".join("/".join(Path(part).parts[-2:]) for part in parts_of(spec.drafter))
    options = [f"{key}={value}" for key, value in spec.options.items()]
    given = spec.growth_options
    shape = shape_label(spec.growth_name, given)
    return " ".join([name, *options]), f"{shape} {given.get('draft', '')}".strip()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _interval(value: Sequence[float] | None) -> str:
    return "" if value is None else f"{value[0]:.2f}-{value[1]:.2f}"

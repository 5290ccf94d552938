"""Plots: a benchmark's figures as matplotlib draws them, for files and for the page."""

import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from inference.page.curves import Line, lines, oracle, verify_cost
from inference.page.labels import drafter_names, full_names

# Readable on white and on near-black.
COLOURS = (
    "#3f7fca",
    "#e07b16",
    "#2f9e67",
    "#d4504f",
    "#8f6fc9",
    "#1b9aaa",
    "#b8860b",
    "#c2579b",
    "#7d7d7d",
)
_STROKES = ("-", "--", ":", "-.")  # shapes of one drafter
_INK = "#010203"  # replaced by the page's own text colour
_PHASES = {"draft": COLOURS[1], "build": COLOURS[4], "verify": COLOURS[0], "commit": COLOURS[2]}
_STYLE: dict[Any, Any] = {
    "font.size": 11.5,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "text.parse_math": False,  # names of drafters and categories are text, whatever is in them
}


def figures(result: Mapping[str, Any]) -> dict[str, Figure]:
    """Return every plot that a benchmark has figures for, by name."""
    with mpl.rc_context(_STYLE):
        found = {
            "speedup": _speedups(result),
            "survival": _survival(result),
            "speedup_by_budget": _budget(result, speed=True),
            "tau_by_budget": _budget(result, speed=False),
            "verify_cost": _verify_cost(result),
            "time_shares": _time_shares(result),
            "categories": _categories(result),
        }
    return {name: figure for name, figure in found.items() if figure is not None}


def save(found: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write every plot as PNG and SVG into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for name, figure in found.items():
        paths += [folder / f"{name}.png", folder / f"{name}.svg"]
        with mpl.rc_context(_STYLE):
            figure.savefig(paths[-2], dpi=160, facecolor="white")
        paths[-1].write_text(_svg(figure, name), encoding="utf-8")
    return paths


def inline(figure: Figure, name: str) -> str:
    """Return a plot for the page: no background, text in the page's colour, no ids to clash."""
    text = _svg(figure, name, transparent=True)
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1).replace(
        "<svg", f'<svg role="img" aria-label="{name.replace("_", " ")}"', 1
    )


def _svg(figure: Figure, name: str, *, transparent: bool = False) -> str:
    buffer = io.StringIO()
    colour = "none" if transparent else "white"
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", facecolor=colour, metadata={"Date": None})
    return buffer.getvalue()


def _axes(height: float = 3.3, width: float = 4.8) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    return figure, axes


def _palette(names: Sequence[str]) -> dict[str, str]:
    return {n: COLOURS[i % len(COLOURS)] for i, n in enumerate(dict.fromkeys(names))}


def _speedups(result: Mapping[str, Any]) -> Figure | None:
    names = drafter_names(result)
    shown = [
        (full, name, one)
        for full, name, one in zip(full_names(result), names, result["drafters"], strict=True)
        if one["speedup"] is not None
    ]
    if not shown:
        return None
    colours = _palette(names)
    figure, axes = _axes(1.2 + 0.36 * len(shown))
    for place, (_, name, one) in enumerate(shown):
        value, between = one["speedup"], one["speedup_interval"]
        axes.barh(place, value, color=colours[name], height=0.62)
        if between:
            reach = [[value - between[0]], [between[1] - value]]
            axes.errorbar(value, place, xerr=reach, color=_INK, capsize=3, linewidth=1.1)
        edge = between[1] if between else value
        axes.annotate(
            f"{value:.2f}", (edge, place), (5, 0), textcoords="offset points", va="center"
        )
    axes.axvline(1, color=_INK, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(shown)), [_short(full) for full, _, _ in shown])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlim(left=0)
    axes.set_xlabel("speed-up (95% interval)")
    return figure


def _survival(result: Mapping[str, Any]) -> Figure | None:
    named = zip(drafter_names(result), full_names(result), result["drafters"], strict=True)
    shown = [
        (name, full, one["survival_by_depth"])
        for name, full, one in named
        if one["survival_by_depth"]
    ]
    if not shown:
        return None
    figure, axes = _axes(3.3 + 0.17 * len(shown))
    colours, drawn = _palette(drafter_names(result)), Counter[str]()
    for name, full, survival in shown:
        style = _STROKES[drawn[name] % len(_STROKES)]
        drawn[name] += 1
        axes.plot(
            range(len(survival) + 1),
            [1, *survival],
            style,
            color=colours[name],
            marker="o",
            ms=4,
            label=_short(full),
        )
    axes.set_ylim(0, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("depth")
    axes.set_ylabel("rounds that accept it")
    _legend(figure)
    return figure


def _budget(result: Mapping[str, Any], *, speed: bool) -> Figure | None:
    names = drafter_names(result)
    found = [line for line in lines(result, names) if line.points]
    if not found:
        return None
    figure, axes = _axes(3.5 + 0.17 * len(found))
    colours = _palette(names)
    for line in found:
        _line(axes, line, colours[line.name], speed=speed)
    points = [point for line in found for point in line.points]
    most = max(point.nodes for point in points)
    ceiling = oracle(result)
    best, limit = max(ceiling, key=lambda point: point[1])
    if speed:
        inside = [point for point in ceiling if point[0] <= max(most, best)]
        axes.plot(*zip(*inside, strict=True), color=_INK, linewidth=1, linestyle=(0, (1, 2)))
        axes.axhline(limit, color=_INK, linewidth=1)
        text = f"oracle: {limit:.2f} at {best} nodes"
        axes.annotate(text, (0, limit), (2, 3), textcoords="offset points", fontsize=10)
        axes.axhline(1, color=_INK, linewidth=0.8, linestyle=":")
        least = min((point.speedup_interval or [point.speedup])[0] for point in points)
        axes.set_yscale("log", base=2)  # the ceiling is often ten times what is measured
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(min(least, 1) / 1.2, limit * 1.25)
    else:
        top = max(point.tau for point in points) * 1.35
        axes.plot([0, most + 1], [1, most + 2], color=_INK, linewidth=1, linestyle=(0, (1, 2)))
        axes.annotate("oracle", (top - 1, top), (4, -10), textcoords="offset points", fontsize=10)
        axes.set_ylim(1, top)
    axes.set_xlim(0, max(most, best if speed else 0) + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("drafted nodes a round (gamma of a chain)")
    axes.set_ylabel("speed-up" if speed else "tau")
    _legend(figure)
    return figure


def _line(axes: Axes, line: Line, colour: str, *, speed: bool) -> None:
    """Draw one drafter: predicted curve, measured points with intervals, trees as diamonds."""
    if line.predicted:
        gammas = [gamma for gamma, _, _ in line.predicted]
        values = [gain if speed else tau for _, tau, gain in line.predicted]
        axes.plot(gammas, values, "--", color=colour, linewidth=1.2)
    for number, point in enumerate(line.points):
        value = point.speedup if speed else point.tau
        between = point.speedup_interval if speed else point.tau_interval
        reach = [[value - between[0]], [between[1] - value]] if between else None
        axes.errorbar(
            point.nodes,
            value,
            yerr=reach,
            color=colour,
            marker="o" if point.chain else "D",
            ms=5.5,
            capsize=2.5,
            linewidth=1,
            label=_short(line.name) if number == 0 else None,
        )


def _verify_cost(result: Mapping[str, Any]) -> Figure | None:
    sizes, costs = zip(*verify_cost(result), strict=True)
    figure, axes = _axes()
    axes.plot(sizes, sizes, color=_INK, linewidth=1, linestyle=":")
    top = max(costs) * 1.3
    axes.annotate("n plain steps", (top, top), (8, -8), textcoords="offset points", fontsize=10)
    axes.plot(sizes, costs, color=COLOURS[0], marker="o", ms=4.5)
    axes.set_ylim(0, top)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("n, tokens in one forward of the target")
    axes.set_ylabel("T(n) / T(1)")
    return figure


def _time_shares(result: Mapping[str, Any]) -> Figure | None:
    every = [("none", result["baseline"]["time_share"])] + [
        (_short(name), one["time_share"])
        for name, one in zip(full_names(result), result["drafters"], strict=True)
    ]
    shown = [(name, share) for name, share in every if all(v is not None for v in share.values())]
    if not shown:
        return None
    figure, axes = _axes(1.5 + 0.34 * len(shown))
    left = np.zeros(len(shown))
    for phase, colour in _PHASES.items():
        part = np.array([100 * share[phase] for _, share in shown])
        axes.barh(range(len(shown)), part, left=left, color=colour, height=0.62, label=phase)
        left += part
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of decoding time")
    figure.legend(loc="outside upper center", ncols=4)
    return figure


def _categories(result: Mapping[str, Any]) -> Figure | None:
    drafters = result["drafters"]
    columns = list(dict.fromkeys(c for one in drafters for c in one["by_category"]))
    if len(columns) < 2:
        return None
    values = np.array(
        [
            [_or_nan((one["by_category"].get(c) or {}).get("speedup")) for c in columns]
            for one in drafters
        ]
    )
    figure, axes = _axes(1.9 + 0.36 * len(drafters), max(4.8, 1.8 + 0.62 * len(columns)))
    known = values[~np.isnan(values)]
    reach = max(float(np.abs(known - 1).max()), 0.1) if len(known) else 1.0
    axes.imshow(values, cmap="RdYlGn", vmin=1 - reach, vmax=1 + reach, aspect="auto", alpha=0.75)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color="black")
    axes.set_yticks(range(len(drafters)), [_short(name) for name in full_names(result)])
    axes.set_xticks(range(len(columns)), columns, rotation=35, ha="right")
    axes.set_xlabel("speed-up by category")
    return figure


def _legend(figure: Figure) -> None:
    figure.legend(loc="outside lower center", ncols=2)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _short(name: str, most: int = 36) -> str:
    """Return the end of a long name: folders differ there."""
    return name if len(name) <= most else f"...{name[3 - most :]}"

"""Labels: what plots and tables call each drafter, so that they agree."""

from collections.abc import Mapping
from typing import Any

from drafters.growth.label import shape_label
from inference.report import drawn, label


def drafter_names(result: Mapping[str, Any]) -> list[str]:
    """Return each entry's drafter, with its folder where several of one method ran."""
    return [label(one, result["drafters"]) for one in result["drafters"]]


def full_names(result: Mapping[str, Any]) -> list[str]:
    """Return each entry's drafter and shape."""
    return [
        f"{name}, {shape}"
        for name, shape in zip(drafter_names(result), shapes(result), strict=True)
    ]


def shapes(result: Mapping[str, Any]) -> list[str]:
    """Return each entry's shape, and how drafts were drawn and judged where that is not usual."""
    return [
        shape_label(one["growth"], one["shape"], one["nodes"]) + drawn(one)
        for one in result["drafters"]
    ]


def number(value: float | None, digits: int = 2) -> str:
    """Return a figure as tables show it."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Return a share as tables show it."""
    return "-" if value is None else f"{100 * value:.0f}%"


def interval(value: tuple[float, float] | list[float] | None) -> str:
    """Return an interval as tables show it."""
    return "" if value is None else f"{value[0]:.2f}-{value[1]:.2f}"

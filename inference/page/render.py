"""Render: one self-contained page of HTML; every text in it is escaped."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from inference.page.curves import oracle
from inference.page.labels import drafter_names, full_names, interval, number, percent, shapes
from inference.page.replay import generations

_CAPTIONS = {
    "speedup": "Speed-up. Tokens a second over plain decoding's, same prompts, same engine, in "
    "turns; prefill excluded. Bars are 95% intervals over prompts.",
    "speedup_by_budget": "Speed-up against budget, logarithmic. Points: measured (diamonds: "
    "trees). Dashed: predicted for chains from survival, T(n) and the cost of drafting. Line on "
    "top: the oracle, perfect drafts for nothing at the best n; dotted: the oracle at each n.",
    "tau_by_budget": "tau against budget. Points: measured. Dashed: shorter chains, from survival. "
    "Dotted: the oracle, which accepts every node.",
    "survival": "Survival. Share of rounds that accept a depth; tau is 1 plus the sum over depths, "
    "but for outputs that end inside a round.",
    "verify_cost": "T(n). The target's forward over n new tokens, relative to one.",
    "time_shares": "Time. Shares of drafting, laying out, verifying, and committing.",
}


def render(
    result: Mapping[str, Any], drawn: Mapping[str, str], traces: Sequence[Mapping[str, Any]]
) -> str:
    """Return the page.

    Args:
        result: benchmark.json.
        drawn: plots as SVG, by name.
        traces: rows of traces.parquet; empty: no replay.
    """
    environment = Environment(
        loader=PackageLoader("inference.page", "templates"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    source = environment.loader
    assert source is not None
    drafters = result["drafters"]
    names = dict(zip([one["name"] for one in drafters], full_names(result), strict=True))
    nodes, ceiling = max(oracle(result), key=lambda point: point[1])
    rows = _rows(result)
    speeds = [(one["speedup"], place) for place, one in enumerate(drafters) if one["speedup"]]
    plots = [(drawn[name], text) for name, text in _CAPTIONS.items() if name in drawn]
    return environment.get_template("report.html.jinja").render(
        result=result,
        rows=rows,
        best=rows[max(speeds)[1]] if speeds else None,
        plots=plots,
        categories=_categories(result),
        replay=generations(traces, names),
        oracle={"nodes": nodes, "speedup": number(ceiling)},
        facts=_facts(result),
        number=number,
        percent=percent,
        style=source.get_source(environment, "style.css")[0],
        script=source.get_source(environment, "replay.js")[0],
    )


def _rows(result: Mapping[str, Any]) -> list[dict[str, str]]:
    prompts = result["settings"]["prompts"]
    named = zip(drafter_names(result), shapes(result), result["drafters"], strict=True)
    return [
        {
            "drafter": name,
            "shape": shape,
            "tau": number(one["tau"]),
            "tau_interval": interval(one["tau_interval"]),
            "distinct": percent(one.get("distinct_4")),
            "looped": percent(one["looped_share"]),
            "alpha": number(one["alpha"]),
            "speedup": number(one["speedup"]),
            "speedup_interval": interval(one["speedup_interval"]),
            "predicted": number(one["predicted_speedup"]),
            "even": number(one["break_even_tau"]),
            "c": number(one["cost_ratio"], 3),
            "no_loops": number(one["without_loops"]["speedup"]),
            "same": "drawn" if one["identical"] is None else f"{one['identical']}/{prompts}",
            "pays": "pays" if _pays(one) else "",
        }
        for name, shape, one in named
    ]


def _pays(one: Mapping[str, Any]) -> bool:
    between = one["speedup_interval"]
    return between is not None and between[0] > 1


def _categories(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the heat map: a line a drafter, a cell a category, shaded by speed-up."""
    drafters = result["drafters"]
    columns = list(dict.fromkeys(name for one in drafters for name in one["by_category"]))
    values = [
        part["speedup"] - 1
        for one in drafters
        for part in one["by_category"].values()
        if part["speedup"] is not None
    ]
    reach = max([abs(value) for value in values] + [0.1])
    lines = [
        (name, [_cell(one["by_category"].get(column), reach) for column in columns])
        for name, one in zip(full_names(result), drafters, strict=True)
    ]
    return {"columns": columns, "lines": lines}


def _cell(part: Mapping[str, Any] | None, reach: float) -> dict[str, Any]:
    if part is None or part["speedup"] is None:
        return {"speedup": "-", "tau": "", "loops": "", "tone": "", "strength": 0}
    gain = part["speedup"] - 1
    return {
        "speedup": number(part["speedup"]),
        "tau": number(part["tau"]),
        "loops": percent(part.get("looped_share")),
        "tone": "gain" if gain >= 0 else "loss",
        "strength": round(75 * min(1.0, abs(gain) / reach)),
    }


def _facts(result: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    return [
        (title, [(name, _plain(value)) for name, value in result[key].items()])
        for title, key in (
            ("Target", "target"),
            ("Settings", "settings"),
            ("Machine", "machine"),
            ("Versions", "versions"),
        )
    ]


def _plain(value: object) -> str:
    return "none" if value is None else f"{value:,}" if type(value) is int else str(value)

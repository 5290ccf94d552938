"""Replay: a few generations of a trace, round by round, as the page steps through them."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

PROMPTS = 3  # a drafter
ROUNDS = 60  # a generation
_QUESTION = 600  # characters of it


def generations(traces: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[Any]:
    """Return the first repeat of each drafter's first prompts.

    Args:
        traces: rows of traces.parquet, in its order.
        names: what the page calls each drafter; those that are not named are left out.

    Returns:
        A drafter's name, its question, and rounds: texts and parents of the tree's nodes, the
        accepted path, what was emitted, milliseconds. Round 0 is the prefill.
    """
    rows = [one for one in traces if one["repeat"] == 0 and one["drafter"] in names]
    found: list[Any] = []
    seen: dict[str, int] = {}
    for (drafter, _), part in groupby(rows, key=lambda one: (one["drafter"], one["prompt"])):
        seen[drafter] = seen.get(drafter, 0) + 1
        if seen[drafter] <= PROMPTS:
            found.append(_generation(names[drafter], list(part)))
    return found


def _generation(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = rows[0]
    return {
        "drafter": name,
        "title": f"{first['question_id']} ({first['category']})",
        "question": (first["question"] or "")[:_QUESTION],
        "cut": len(rows) > ROUNDS,
        "rounds": [
            {
                "texts": one["texts"] or [],
                "parents": one["parents"] or [],
                "path": one["path"] or [],
                "emitted": one["emitted_texts"],
                "ms": None if one["seconds"] is None else round(1000 * one["seconds"], 2),
            }
            for one in rows[:ROUNDS]
        ],
    }

"""Regression: runs of one benchmark held against the first of them, in pairs of prompts.

tau and speed-up change by a ratio. Where both files have their prompts' sums, its 95% interval
comes from resampling prompts in pairs, and a change counts if the whole interval says so. Files
without them are judged by their own intervals: those must not touch.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from drafters.growth.label import shape_label
from inference.stats import Estimate, Work, change, speedup

_MUST_AGREE = ("prompts_file", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "rows")
_PER_PROMPT = "by_prompt"


def compare_runs(
    old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float = 0.0
) -> dict[str, Any]:
    """Hold a benchmark.json against an earlier one.

    Args:
        old: what it is compared with.
        new: the run to judge.
        tolerance: a loss up to this share is none.

    Returns:
        `warnings`: why figures may not be comparable; `drafters`: of those in both, old and new
        values, ratio, interval and verdict of tau and speed-up, and whether outputs broke;
        `missing`, `added`: names; `regressions`: one line each.
    """
    clashes = _clashes(old["drafters"]) | _clashes(new["drafters"])
    before = {_key(one, clashes): one for one in old["drafters"]}
    after = {_key(one, clashes): one for one in new["drafters"]}
    lines = [_drafter(before[key], one, tolerance) for key, one in after.items() if key in before]
    missing = [one["name"] for key, one in before.items() if key not in after]
    regressions = [
        f"{line['name']}: {figure} fell from {line[figure]['old']:.3f} to {line[figure]['new']:.3f}"
        for line in lines
        for figure in ("tau", "speedup")
        if line[figure]["verdict"] == "regressed"
    ]
    regressions += [
        f"{line['name']}: {line['different']} outputs differ from plain decoding's"
        for line in lines
        if line["outputs"] == "regressed"
    ]
    return {
        "warnings": _warnings(old, new),
        "drafters": lines,
        "missing": missing,
        "added": [one["name"] for key, one in after.items() if key not in before],
        "regressions": regressions,
    }


def _clashes(drafters: Sequence[Mapping[str, Any]]) -> set[tuple[str, ...]]:
    counts = Counter(_key(one) for one in drafters)
    return {key for key, count in counts.items() if count > 1}


def _key(one: Mapping[str, Any], clashes: Collection[tuple[str, ...]] = ()) -> tuple[str, ...]:
    """Return what makes two entries the same drafter: weights may lie in another folder.

    Where several of one run would be the same, the name decides.
    """
    method = "+".join(m["method"] for m in one.get("members", ())) or one["method"]
    shape = shape_label(one["growth"], one["shape"], one["nodes"])
    key = (method, shape, one.get("draft_mode", ""), one["verify_mode"])
    return (*key, one["name"]) if key in clashes else key


def _drafter(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> dict[str, Any]:
    pairs = _pairs(old, new)
    by_rounds = by_speed = None
    if pairs:
        by_rounds = speedup([_tau_work(n) for _, n in pairs], [_tau_work(o) for o, _ in pairs])
        by_speed = change([_speed_work(n) for _, n in pairs], [_speed_work(o) for o, _ in pairs])
    broke = (new.get("different") or 0) > (old.get("different") or 0)
    return {
        "name": new["name"],
        "prompts_in_pairs": len(pairs),
        "tau": _figure(old, new, "tau", by_rounds, tolerance),
        "speedup": _figure(old, new, "speedup", by_speed, tolerance),
        "different": new.get("different"),
        "outputs": "regressed" if broke else "same",
    }


def _pairs(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return the sums of the prompts that are in both; a question may be asked in several sets."""
    sums = {(p["category"], p["question_id"]): p for p in old.get(_PER_PROMPT, ())}
    both = [(sums.get((p["category"], p["question_id"])), p) for p in new.get(_PER_PROMPT, ())]
    return [(o, n) for o, n in both if o is not None]


def _tau_work(prompt: Mapping[str, Any]) -> Work:
    return Work(prompt["tokens"], prompt["rounds"])


def _speed_work(prompt: Mapping[str, Any]) -> tuple[Work, Work]:
    plain = Work(prompt["plain_tokens"], prompt["plain_seconds"])
    return Work(prompt["tokens"], prompt["seconds"]), plain


def _figure(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    name: str,
    paired: Estimate | None,
    tolerance: float,
) -> dict[str, Any]:
    before, after = old[name], new[name]
    found: dict[str, Any] = {"old": before, "new": after, "ratio": None, "interval": None}
    if before is None or after is None:
        return {**found, "verdict": "unknown"}
    if paired is not None and paired.value is not None:
        between = paired.interval
        found |= {"ratio": paired.value, "interval": between}
    else:
        found["ratio"] = after / before
        between = _apart(old[f"{name}_interval"], new[f"{name}_interval"])
    return {**found, "verdict": _verdict(between, tolerance)}


def _apart(old: Sequence[float] | None, new: Sequence[float] | None) -> tuple[float, float] | None:
    """Return the least and greatest ratio that two intervals allow."""
    return None if old is None or new is None else (new[0] / old[1], new[1] / old[0])


def _verdict(between: Sequence[float] | None, tolerance: float) -> str:
    """Judge a ratio's interval; nothing is judged without one: a single prompt tells nothing."""
    if between is None:
        return "unknown"
    if between[1] < 1 - tolerance:
        return "regressed"
    return "improved" if between[0] > 1 + tolerance else "same"


def _warnings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{name} differs: {old['settings'].get(name)} and {new['settings'].get(name)}"
        for name in _MUST_AGREE
        if old["settings"].get(name) != new["settings"].get(name)
    ]
    for part, names in (("target", ("title", "dtype", "engine")), ("machine", ("cpu", "gpu"))):
        for name in names:
            before, after = old.get(part, {}).get(name), new.get(part, {}).get(name)
            if before != after:
                lines.append(f"{part} {name} differs: {before} and {after}")
    return lines

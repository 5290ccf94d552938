"""Estimate: what a run would take, for --dry-run. One batch is made and learned from to know."""

import math
import time
from collections import Counter

from training.features import Lesson, bytes_kept
from training.options import seconds
from training.parts import Parts

PARAMETER_BYTES = 16  # bytes in float32: weight, gradient and AdamW's two moments


def estimate(parts: Parts) -> list[str]:
    """Return lines about parameters, memory and time; weights are left as they are."""
    return [_parameters(parts), _memory(parts), *_time(parts)]


def _parameters(parts: Parts) -> str:
    counts: Counter[str] = Counter()
    for name, parameter in parts.objective.drafter.named_parameters():
        if parameter.requires_grad:
            counts[name.partition(".")[0]] += parameter.numel()
    listed = ", ".join(f"{name} {_millions(count)}" for name, count in counts.items())
    return f"parameters: {_millions(counts.total())} trained ({listed})"


def _memory(parts: Parts) -> str:
    objective, lessons = parts.objective, parts.lessons
    trained = sum(p.numel() for p in objective.drafter.parameters() if p.requires_grad)
    target = objective.target
    held = (p for p in target.model.parameters() if p.device == target.device)
    weights = sum(p.numel() * p.element_size() for p in held)
    kept = sum(bytes_kept(side) for side in (lessons, parts.held_out))
    batch = lessons[0].batch
    ids = objective.drafter.ids
    width = target.shape.vocab_size if ids is None else len(ids)
    logits = min(batch.ids.numel() * width * 4, parts.settings.loss.keep_logits_mb * 2**20)
    total = weights + trained * PARAMETER_BYTES + kept + logits
    return (
        f"memory from below: {_mib(total)} (target {_mib(weights)}, drafter with gradients and "
        f"moments {_mib(trained * PARAMETER_BYTES)}, features kept {_mib(kept)}, logits of a depth "
        f"{_mib(logits)})"
    )


def _time(parts: Parts) -> list[str]:
    lessons, settings = parts.lessons, parts.settings
    where = "the store" if lessons.is_stored(0) else "the target"
    started = time.perf_counter()
    lesson = lessons.make(0)
    target_seconds = time.perf_counter() - started
    # the first pass pays for what is made once
    learning = min(_learning_seconds(parts, lesson) for _ in range(2))
    group = settings.optim.accumulate * parts.accelerator.num_processes
    steps_a_pass = math.ceil(len(lessons) / group)
    first = steps_a_pass * settings.optim.accumulate * (target_seconds + learning)
    again = lessons.settings.keep == "none" and lessons.store is None
    later = first if again else first * learning / (target_seconds + learning)
    lines = [
        f"time: a batch takes about {target_seconds:.2f} s in {where} and {learning:.2f} s in "
        f"the drafter; {steps_a_pass} steps a pass, {first:.0f} s for the first pass, {later:.0f} "
        "s for each later one, evaluations apart"
    ]
    schedule = settings.schedule
    passes = schedule.epochs if schedule.epochs is not None else math.inf
    if schedule.steps is not None:
        passes = min(passes, schedule.steps / steps_a_pass)
    if schedule.time_budget is not None:
        budget = seconds(schedule.time_budget)
        affordable = budget / first if budget < first else 1 + (budget - first) / later
        passes = min(passes, affordable)
    whole = first * min(1.0, passes) + later * max(0.0, passes - 1)
    lines.append(
        f"the schedule makes about {passes * steps_a_pass:.0f} steps, {passes:.1f} passes, "
        f"{whole:.0f} s"
    )
    return lines


def _learning_seconds(parts: Parts, lesson: Lesson) -> float:
    started = time.perf_counter()
    parts.objective(lesson).loss.sum().backward()
    parts.objective.zero_grad()
    return time.perf_counter() - started


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"

"""Where the time of training goes: the parts of a step against the machine's matrix rate.

python -m tests.load.steps eagle --config configs/drafters/eagle3.yaml --steps 20 target=T \
    output=unused data.path=configs/chats data.tokens=20000 threads=1

The target's forward and its laws' sums are paid once a chat; with states kept a step begins behind
them. The linear maps' operations are counted off the drafter (training/workload.py).
"""

import argparse
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from drafters.losses import drafter_loss
from drafters.settings import find_config, load
from drafters.teacher import summarise
from training.optim import make_optimizer
from training.options import TrainSettings
from training.parts import Parts, prepare
from training.workload import Workload, workload

PARTS = ("target forward", "teacher sums", "reading states", "drafter forward", "loss forward")
PARTS += ("backward", "update")
_ONCE = PARTS[:2]  # of a chat, whatever the number of passes
_SIDE = 1024  # of the matrices whose product tells the machine's rate


def main(arguments: list[str] | None = None) -> None:
    """Print a table, a line for every part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family")
    parser.add_argument("settings", nargs="*", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_intermixed_args(arguments)
    settings = load(TrainSettings, [find_config(options.config)], options.settings)
    parts = prepare(options.family, settings)
    work = workload(
        options.family,
        parts.settings.drafter,
        parts.objective.target.shape,
        supervised=_supervised(parts),
        loss=settings.loss,
    )
    times, rates, tokens = measured(parts, options.steps)
    Console(width=100).print(_table(times, tokens, work), _summary(times, rates, tokens, work))


def measured(parts: Parts, steps: int) -> tuple[dict[str, list[float]], list[float], list[int]]:
    """Return the seconds of every part a step, the rates of a matrix product, and tokens a step.

    The first step, which makes what is made once, is left out.
    """
    objective, lessons, loss = parts.objective, parts.lessons, parts.settings.loss
    optimizer = make_optimizer(objective.drafter, parts.settings.optim)
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    rates: list[float] = []
    tokens: list[int] = []
    for step in range(steps + 1):
        index = step % len(lessons)
        examples = [lessons.examples[i] for i in lessons.groups[index]]
        _ = lessons[index]  # kept from here on
        marks = [time.perf_counter()]
        made = lessons.lesson_of(examples)
        marks.append(time.perf_counter())
        summarise(made.batch, objective.target, loss.temperature, loss.chunk)
        marks.append(time.perf_counter())
        lesson = lessons[index]
        marks.append(time.perf_counter())
        predictions = objective.drafter.predict(lesson.batch, objective.target)
        marks.append(time.perf_counter())
        sums = drafter_loss(predictions, lesson.batch, objective.teacher, loss, lesson.summary)
        marks.append(time.perf_counter())
        (sums.loss.sum() / sums.weight.sum()).backward()
        marks.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(objective.drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append(time.perf_counter())
        taken = [b - a for a, b in pairwise(marks)]
        target, teacher, *rest = taken
        if step:
            for part, seconds in zip(PARTS, (target - teacher, teacher, *rest), strict=True):
                times[part].append(seconds)
            rates.append(_matrix_rate())
            tokens.append(lesson.tokens)
    return times, rates, tokens


def _matrix_rate() -> float:
    """Return operations a second of a matrix product."""
    one = torch.randn(_SIDE, _SIDE)
    start = time.perf_counter()
    _ = one @ one
    return 2 * _SIDE**3 / (time.perf_counter() - start)


def _supervised(parts: Parts) -> float:
    masks = [example.label_mask for example in parts.lessons.examples]
    return float(sum(int(mask.sum()) for mask in masks) / sum(len(mask) for mask in masks))


def _seconds(times: dict[str, list[float]]) -> tuple[float, float]:
    """Return the seconds of all parts, and of those that states once kept leave."""
    kept = sum(sum(taken) for part, taken in times.items() if part not in _ONCE)
    return sum(sum(taken) for taken in times.values()), kept


def _table(times: dict[str, list[float]], tokens: list[int], work: Workload) -> Table:
    flops = {
        "teacher sums": work.teacher_flops,
        "backward": 2 * work.forward_flops,
    }
    whole, kept = _seconds(times)
    table = Table("part", "ms a step", "first pass", "states kept", "GFLOP/s", box=SIMPLE_HEAD)
    for part, taken in times.items():
        later = "" if part in _ONCE else f"{sum(taken) / kept:.0%}"
        rate = flops.get(part, 0) * sum(tokens) / sum(taken) / 1e9
        shown = f"{rate:.0f}" if rate else ""
        table.add_row(part, f"{1e3 * median(taken):.0f}", f"{sum(taken) / whole:.0%}", later, shown)
    return table


def _summary(
    times: dict[str, list[float]], rates: list[float], tokens: list[int], work: Workload
) -> str:
    whole, kept = _seconds(times)
    reached = work.training_flops * sum(tokens) / kept
    return (
        f"{sum(tokens) / whole:.0f} tokens/s in the first pass, {sum(tokens) / kept:.0f} with "
        f"states kept: {reached / 1e9:.0f} GFLOP/s in linear maps, {reached / median(rates):.0%} "
        f"of a product of two {_SIDE} x {_SIDE} matrices ({median(rates) / 1e9:.0f} GFLOP/s); "
        f"{torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()

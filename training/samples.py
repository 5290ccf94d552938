"""Samples: what a drafter brought, for people: texts with accepted drafts marked, and a table."""

from pathlib import Path
from typing import Any

from drafters.settings import own
from drafters.target import Target
from inference import Output, report
from inference.bench import BenchSettings, contenders, measure
from inference.prompts import Prompt, read_prompts
from inference.spec import Spec
from inference.summary import summarise
from training.options import TrainSettings

SAMPLES = 3
MARKED = ["tau", "text"]
FIGURES = ["name", "tau", "alpha", "speedup", "from", "to", "tokens_per_second", "identical"]


def marked(output: Output, tokenizer: Any) -> str:
    """Return a text with the drafts that each round accepted in brackets.

    A round emits what it accepted and one token of the target's own: `[and the] end [of] it` took
    two rounds. Without a tokenizer, ids stand for words.
    """
    pieces = [_text(output.ids[:1], tokenizer)]
    place = 1
    for accepted in output.accepted:
        drafted, own_token = output.ids[place : place + accepted], place + accepted
        if drafted:
            pieces.append(f"[{_text(drafted, tokenizer)}]")
        pieces.append(_text(output.ids[own_token : own_token + 1], tokenizer))
        place = own_token + 1
    return "".join(pieces)


def _text(ids: list[int], tokenizer: Any) -> str:
    return "".join(f" {i}" for i in ids) if tokenizer is None else str(tokenizer.decode(ids))


def sample_rows(outputs: list[Output], target: Target) -> list[list[Any]]:
    """Return a row of MARKED for each of the first outputs."""
    return [[round(o.tau, 3), marked(o, target.tokenizer)] for o in outputs[:SAMPLES]]


def benchmark_prompts(settings: TrainSettings) -> list[Prompt]:
    """Return the prompts of the run's last table; none where it was not asked for.

    Raises:
        UserError: they cannot be read.
    """
    path = settings.tracking.benchmark
    return read_prompts(own(path), max(1, settings.evaluate.prompts)) if path else []


def benchmark_rows(
    target: Target, folder: Path, prompts: list[Prompt], settings: TrainSettings
) -> list[list[Any]]:
    """Measure a published drafter beside plain decoding; write benchmark.json beside the folder.

    Returns:
        A row of FIGURES for plain decoding, then one for the drafter.
    """
    name = f"{folder}:{settings.evaluate.shape}"
    bench = BenchSettings(settings.evaluate.new_tokens, seed=settings.seed, repeats=1, warmup=1)
    measured = measure(target, contenders(target, [Spec.parse(name)]), prompts, bench)
    result = summarise(measured, settings.tracking.benchmark)
    report.write(result, folder.parent)
    plain = ["none", 1.0, None, 1.0, 1.0, 1.0, result["baseline"]["tokens_per_second"], None]
    return [plain, *([*map(_figure(one), FIGURES)] for one in result["drafters"])]


def _figure(one: dict[str, Any]) -> Any:
    low, high = one["speedup_interval"] or (None, None)
    return (one | {"from": low, "to": high}).get

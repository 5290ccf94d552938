"""Traces: every round of a benchmark as a row of a Parquet file, trees and texts included.

While the clock runs a trace is two references to tensors and two tuples; lists and texts are made
once everything is measured. The prefill is round 0: no tree, one emitted token.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from drafters.errors import UserError
from drafters.target import Target
from drafters.whole import whole_file
from inference.bench import Contender, Measurement

FILE = "traces.parquet"
_IDS, _TEXTS = pa.list_(pa.int32()), pa.list_(pa.string())
_SCHEMA = pa.schema(
    {
        "drafter": pa.string(),
        "repeat": pa.int32(),
        "prompt": pa.int32(),
        "question_id": pa.string(),
        "category": pa.string(),
        "question": pa.string(),
        "round": pa.int32(),
        "position": pa.int32(),
        "tokens": _IDS,
        "parents": _IDS,
        "texts": _TEXTS,
        "path": _IDS,
        "emitted": _IDS,
        "emitted_texts": _TEXTS,
        "looped": pa.bool_(),
        "seconds": pa.float64(),
        "draft": pa.float64(),
        "build": pa.float64(),
        "verify": pa.float64(),
        "commit": pa.float64(),
    }
)


def write_traces(measured: Measurement, folder: str | Path) -> Path:
    """Write FOLDER/traces.parquet; docs/reports.md names its columns.

    Raises:
        UserError: if the folder cannot be written.
    """
    path, text = Path(folder) / FILE, _texts(measured.target)
    race = [measured.baseline, *measured.drafters]
    rows = [row for one in race for row in _rows(measured, one, text)]
    with whole_file(path) as new:
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), new, compression="zstd")
    return path


def read_traces(folder: str | Path) -> list[dict[str, Any]]:
    """Return the rows of FOLDER/traces.parquet; none where there is no such file.

    Raises:
        UserError: if the file is no trace.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return []
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: it is no Parquet file; remove it") from error
    missing = set(_SCHEMA.names) - set(table.column_names)
    if missing:
        raise UserError(f"{path} has no column {', '.join(sorted(missing))}: measure again")
    return table.to_pylist()


def _rows(
    measured: Measurement, contender: Contender, text: Callable[[int], str]
) -> Iterator[Mapping[str, Any]]:
    for one in contender.passes:
        for number, output in zip(one.prompts, one.outputs, strict=True):
            prompt = measured.prompts[number]
            common = {
                "drafter": contender.name,
                "repeat": one.repeat,
                "prompt": number,
                "question_id": prompt.question_id,
                "category": prompt.category,
            }
            first = output.ids[:1]
            yield {
                **common,
                "question": prompt.turns[0],
                "round": 0,
                "position": len(measured.ids[number]) - 1,
                "emitted": first,
                "emitted_texts": [text(token) for token in first],
            }
            pairs = zip(output.rounds, output.traces, strict=True)
            for count, (spent, trace) in enumerate(pairs, start=1):
                tokens = trace.tokens.tolist()
                yield {
                    **common,
                    "round": count,
                    "position": spent.position,
                    "tokens": tokens,
                    "parents": trace.parent.tolist(),
                    "texts": [text(token) for token in tokens],
                    "path": list(trace.path),
                    "emitted": list(trace.emitted),
                    "emitted_texts": [text(token) for token in trace.emitted],
                    "looped": spent.looped,
                    "seconds": spent.seconds,
                    **trace.phases,
                }


def _texts(target: Target) -> Callable[[int], str]:
    """Return what a token reads as: its id where the target has no tokenizer."""
    tokenizer = target.tokenizer

    @cache
    def text(token: int) -> str:
        return str(token) if tokenizer is None else tokenizer.decode([token])

    return text

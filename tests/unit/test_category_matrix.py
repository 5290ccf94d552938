"""The category matrix of a literal benchmark."""

from io import StringIO
from typing import Any

from rich.console import Console

from inference.category_matrix import tables


def drafter(name: str, **speedups: float | None) -> dict[str, Any]:
    by_category = {key: {"speedup": value} for key, value in speedups.items()}
    return {"name": name, "tau": 2.5, "speedup": 1.75, "by_category": by_category}


def test_categories_stand_across_and_the_whole_last() -> None:
    folder = drafter("runs/demo/eagle/best:growth=dynamic,nodes=8,width=3,depth=4", qa=1.5)
    result = {"drafters": [drafter("ngram:gamma=4", qa=1.25, rag=None), folder]}
    console = Console(width=100, record=True, file=StringIO())
    console.print(*tables(result))
    lines = [line.split() for line in console.export_text().splitlines() if line.strip()]
    assert lines[1] == ["drafter", "qa", "rag", "tau", "overall"]
    assert lines[3:] == [
        ["none", "1.00", "1.00", "1.00", "1.00"],
        ["ngram", "chain", "4", "1.25", "-", "2.50", "1.75"],
        ["eagle/best", "dynamic", "8/3/4", "1.50", "-", "2.50", "1.75"],
    ]


def test_one_category_needs_no_matrix() -> None:
    assert tables({"drafters": [drafter("ngram:gamma=4", qa=1.25)]}) == []
    assert tables({"drafters": []}) == []

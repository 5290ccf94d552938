"""docs/files.md: every module of the packages with the first line of its own docstring.

python -m tests.files writes it anew.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "files.md"
_INTRO = """# Files

What each module of the packages is for, in the first line of its own docstring. The README shows
what lies around them, [architecture.md](architecture.md) how a round and a batch go through them.
Beside these: `drafters/native.c` (native.py compiles it), `drafters/card.md.jinja` (card.py) and
`inference/page/templates/` (render.py).
"""


def page() -> str:
    """Return the document."""
    lists = (f"## {name}\n\n```text\n{_list(name)}\n```\n" for name in _packages())
    return "\n".join((_INTRO, *lists))


def _packages() -> Iterator[str]:
    for top in ("drafters", "inference", "training"):
        folders = [ROOT / top, *sorted((ROOT / top).rglob("*/"))]
        yield from (str(f.relative_to(ROOT)) for f in folders if (f / "__init__.py").exists())


def _list(package: str) -> str:
    modules = sorted((ROOT / package).glob("*.py"))
    width = max(len(module.name) for module in modules)
    return "\n".join(f"{module.name:<{width}}  {_first_line(module)}" for module in modules)


def _first_line(module: Path) -> str:
    doc = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    assert doc, f"{module} has no docstring"
    return doc.partition("\n")[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

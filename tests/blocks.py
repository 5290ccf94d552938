"""Code blocks of README.md and docs/*.md, and the command lines in them.

A block's first fence says its language: `sh` and `python` are run by tests/smoke/test_documents.py,
`text` shows output, a picture or a file. A comment before a block says why it is not run:
`<!-- not run: needs a GPU -->`.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_REASON = re.compile(r"<!-- not run: (.+) -->\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Args:
        file, line: where its first line stands.
        language: after the fence; empty: none was given.
        text: what is between the fences.
        reason: why it is not run; None: it is.
    """

    file: Path
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        """Name it for a test's id."""
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def blocks(file: Path) -> list[Block]:
    """Return the blocks of a document in order."""
    text = file.read_text(encoding="utf-8")
    found: list[Block] = []
    for match in _FENCED.finditer(text):
        before = text[: match.start()].rstrip()
        reason = _REASON.search(before[before.rfind("\n") + 1 :])
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(file, line, match[1], match[2], reason[1] if reason else None))
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of every command; `$(...)` is one word, comments are left out.

    NAME=value alone is yielded as one word, NAME=value before a command is dropped.
    """
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        whole = re.sub(r"\$\([^)]*\)", lambda match: match[0].replace(" ", "\0"), line)
        words = [word.replace("\0", " ") for word in shlex.split(whole, comments=True)]
        while len(words) > 1 and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


def script_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Return a script (relative to scripts/) and its arguments; None: another program."""
    match words:
        case ["python", script, *rest] if script.startswith(("scripts/", "training/")):
            return _relative(script), rest
        case ["drafters", "train", *rest]:
            place = next(i for i, word in enumerate(rest) if not word.startswith("-"))
            return f"../training/train_{rest[place].replace('-', '_')}.py", rest[place + 1 :]
        case ["drafters", name, *rest] if not name.startswith("-"):
            return f"{name.replace('-', '_')}.py", rest
        case ["accelerate", "launch", *rest]:
            place = next(i for i, word in enumerate(rest) if word.endswith(".py"))
            return _relative(rest[place]), rest[place + 1 :]
        case _:
            return None


def _relative(script: str) -> str:
    return script.removeprefix("scripts/") if script.startswith("scripts/") else f"../{script}"

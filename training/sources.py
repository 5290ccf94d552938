"""Sources: how chats begin - with first words, with given messages, or with a text to continue."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from drafters.digest import digest
from drafters.errors import UserError
from drafters.settings import own
from drafters.untrusted import lines_of
from inference.prompts import read_prompts

SELF_CHAT, PROMPTS, TEXTS = "self-chat", "prompts", "texts"


@dataclass(frozen=True)
class Start:
    """The beginning of one chat.

    Args:
        name: of a given prompt; "" otherwise.
        category: of a given prompt or opening; "" if it has none.
        opening: first words of a message that the target writes; "" leaves it free.
        given: messages that are given; empty if the target writes them.
    """

    name: str = ""
    category: str = ""
    opening: str = ""
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """The beginnings of a run's chats.

    Args:
        kind: self-chat, prompts or texts.
        starts: in the order of use. Those of a self-chat are used again and again.
    """

    kind: str
    starts: tuple[Start, ...]

    @property
    def size(self) -> int | None:
        """Return how many chats there are at most; None: no end."""
        return None if self.kind == SELF_CHAT else len(self.starts)

    def start(self, number: int, temperatures: int) -> Start:
        """Return the beginning of chat `number`; an opening serves each temperature in turn."""
        if self.kind == SELF_CHAT:
            return self.starts[number // temperatures % len(self.starts)]
        return self.starts[number]

    @property
    def digest(self) -> str:
        """Return what tells this source from another one."""
        text = json.dumps([self.kind, [asdict(start) for start in self.starts]])
        return digest(text)


def self_chat(openings: Path | None, seed: int) -> Source:
    """Let the target write the user's messages.

    Args:
        openings: a text file with one opening a line; in it, backslash n is a line break; before
            it, a category and a tab if wanted. No words: the message is free. None: all are.
        seed: of the order.

    Raises:
        UserError: if the file cannot be read or is empty.
    """
    lines = [""] if openings is None else _lines(openings, "openings")
    starts: list[Start] = []
    for line in lines:
        category, tab, opening = line.rpartition("\t")
        words = opening.strip().replace("\\n", "\n")
        starts.append(Start(category=category if tab else "", opening=words))
    order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(seed)).tolist()
    return Source(SELF_CHAT, tuple(starts[i] for i in order))


def given_prompts(path: Path) -> Source:
    """Answer given prompts.

    Raises:
        UserError: names the file, the line and what is wrong with it, or a name that comes twice.
    """
    prompts = read_prompts(path)
    names: set[str] = set()
    for prompt in prompts:
        if prompt.question_id in names:
            raise UserError(f"{path}: question_id {prompt.question_id} comes twice: name each once")
        names.add(prompt.question_id)
        if prompt.system:
            raise UserError(
                f"{path}: question_id {prompt.question_id} has a system message: give prompts "
                "without, the target answers none here"
            )
    starts = [Start(p.question_id, p.category, given=p.turns) for p in prompts]
    return Source(PROMPTS, tuple(starts))


def given_texts(path: Path) -> Source:
    """Continue given lines of text; empty ones are skipped.

    Raises:
        UserError: if the file cannot be read or is empty.
    """
    lines = [line for line in _lines(path, "texts") if line.strip()]
    if not lines:
        raise UserError(f"{path} holds no text: give one text a line")
    return Source(TEXTS, tuple(Start(given=(line,)) for line in lines))


def _lines(path: Path, what: str) -> Sequence[str]:
    try:
        lines = [line.removesuffix("\n") for line in lines_of(own(path))]
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}): give a text file") from error
    except OSError as error:
        raise UserError(
            f"{what} {path} cannot be read ({error.strerror}): give a text file"
        ) from error
    if not lines:
        raise UserError(f"{path} is empty: give one line for each of the {what}")
    return lines

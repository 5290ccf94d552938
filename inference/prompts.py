"""Prompts: sets of questions in the forms that people have, and texts as the target reads them.

JSONL or Parquet. A line holds `turns` (Spec-Bench, MT-Bench, SPEED-Bench), `prompt` (one text, or
the turns) or `messages` (Hugging Face chats, whose answers are left out); other keys are left
alone. Instruct targets read a chat through their template, base targets the text as it is.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as parquet
from pyarrow.lib import ArrowInvalid

from drafters.errors import UserError
from drafters.settings import own
from drafters.target import Target
from drafters.untrusted import lines_of

_FORM = (
    '{"question_id": 1, "category": "chat", "turns": ["..."]}, {"prompt": "..."} or '
    '{"messages": [{"role": "user", "content": "..."}]}'
)
_IDS = ("question_id", "prompt_id", "id")


@dataclass(frozen=True)
class Prompt:
    """One question of a set.

    Args:
        question_id: as the file has it, whole numbers as text; the line's number if it has none.
        category: what reports group by; the file's name if it has none.
        turns: the user's messages, at least one, none empty.
        system: what stands before them; "" for nothing.
    """

    question_id: str
    category: str
    turns: tuple[str, ...]
    system: str = ""


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read a prompt set.

    Args:
        path: JSONL in UTF-8, blank lines skipped; or Parquet, by its ending.
        limit: read only the first so many prompts.

    Raises:
        UserError: names the file, the line and what is wrong with it.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}: give 1 or more")
    file = own(path)
    try:
        if file.suffix == ".parquet":
            prompts = [_prompt(*row) for row in islice(_rows(file), limit)]
        else:
            prompts = [_prompt(*line) for line in islice(_lines(file), limit)]
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}): give a JSONL file") from error
    except ArrowInvalid as error:
        raise UserError(f"{path} is no Parquet: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a JSONL file") from error
    if not prompts:
        raise UserError(f"{path} holds no prompts: give lines such as {_FORM}")
    return prompts


def _rows(file: Path) -> Iterator[tuple[Path, int, Any]]:
    with parquet.ParquetFile(file) as table:
        number = 0
        for batch in table.iter_batches(64):
            for row in batch.to_pylist():
                number += 1
                yield file, number, {key: value for key, value in row.items() if value is not None}


def _lines(file: Path) -> Iterator[tuple[Path, int, Any]]:
    for number, line in enumerate(lines_of(file), start=1):
        if line.strip():
            try:
                yield file, number, json.loads(line)
            except (ValueError, RecursionError) as error:
                place = f"{file}, line {number}"
                raise UserError(f"{place}: not JSON ({error}): give {_FORM}") from error


def _prompt(file: Path, number: int, found: Any) -> Prompt:
    place = f"{file}, line {number}"
    if not isinstance(found, dict):
        raise UserError(f"{place}: holds {type(found).__name__}, not an object: give {_FORM}")
    question: Any = next((found[key] for key in _IDS if key in found), number)
    if not isinstance(question, str | int) or isinstance(question, bool):
        raise UserError(f"{place}: question_id is {question!r}: give a number or a text")
    category = found.get("category", file.stem)
    if not isinstance(category, str):
        raise UserError(f"{place}: category is {category!r}: give a text")
    system, turns = _turns(place, found)
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{place}: turns is {turns!r}: give a list of at least one text")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise UserError(f"{place}: a turn is {turn!r}: give a text that is not empty")
    return Prompt(str(question), category, tuple(turns), system)


def _turns(place: str, found: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the system's text and the user's turns, which are still to be checked."""
    if "turns" in found:
        return "", found["turns"]
    if "prompt" in found:
        prompt = found["prompt"]
        return "", [prompt] if isinstance(prompt, str) else prompt
    if "messages" not in found:
        raise UserError(f"{place}: has no 'turns', 'prompt' or 'messages': give {_FORM}")
    messages = found["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages
    ):
        raise UserError(f"{place}: messages are {messages!r}: give a list of role and content")
    said = {
        role: [m["content"] for m in messages if m.get("role") == role]
        for role in ("system", "user")
    }
    return "\n".join(said["system"]), said["user"]


class HasTokenizer(Protocol):
    """What reads text; every Target does."""

    @property
    def name(self) -> str:
        """Return how messages call it."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Return its tokenizer, None if there is none."""
        ...


def has_template(target: HasTokenizer) -> bool:
    """Tell whether the target reads chats."""
    return target.tokenizer is not None and bool(target.tokenizer.chat_template)


def chat_ids(
    target: Target, messages: Sequence[dict[str, str]], options: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the ids of a chat, up to where the assistant's answer begins.

    Args:
        target: whose template is used.
        messages: `{"role": ..., "content": ...}`, the last one the user's.
        options: what the template is given, such as {"enable_thinking": False}.

    Raises:
        UserError: if the target has no template, or its template refuses the chat.
    """
    if not has_template(target):
        raise UserError(f"{target.name} has no chat template: give the text raw, without roles")
    text = rendered(target, messages, add_generation_prompt=True, **(options or {}))
    # the template writes its own special tokens
    return _encoded(target, text, add_special_tokens=False)


def rendered(target: HasTokenizer, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Return a chat as the target's template writes it.

    Raises:
        UserError: if the template, which is somebody's program, refuses the chat or fails.
    """
    try:
        return target.tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"the chat template of {target.name} refuses the chat: {reason}") from error


def text_ids(target: Target, text: str) -> list[int]:
    """Return the ids of a text as it is.

    Raises:
        UserError: if the target has no tokenizer, or the text no tokens.
    """
    if target.tokenizer is None:
        raise UserError(f"{target.name} has no tokenizer: give one that reads text")
    ids = _encoded(target, text)
    if not ids:
        raise UserError(f"the prompt {text!r} has no tokens: give at least one")
    return ids


def _encoded(target: Target, text: str, **options: Any) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 10) : error.start]
        raise UserError(
            f"a prompt holds what is no character after {near!r}: give UTF-8 text"
        ) from error
    return target.tokenizer(text, **options)["input_ids"]


def first_turn_ids(
    target: Target, prompts: Sequence[Prompt], options: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Return the ids of every prompt's first turn, through the chat template if there is one."""
    if not has_template(target):
        texts = ("\n".join(filter(None, (p.system, p.turns[0]))) for p in prompts)
        return [text_ids(target, text) for text in texts]
    return [chat_ids(target, _first_turn(prompt), options) for prompt in prompts]


def _first_turn(prompt: Prompt) -> list[dict[str, str]]:
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system, {"role": "user", "content": prompt.turns[0]}]

"""Prompts: JSONL prompt sets in the Spec-Bench form, and texts as the target wants to read them.

A line is `{"question_id": 81, "category": "writing", "turns": ["...", ...]}`; other keys are left
alone. Instruct targets read a chat through their template, base targets the text as it is.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from drafters.errors import UserError
from drafters.target import Target

_FORM = '{"question_id": 1, "category": "chat", "turns": ["..."]}'


@dataclass(frozen=True)
class Prompt:
    """One question of a set.

    Args:
        question_id: as the file has it; whole numbers become text.
        category: what reports group by.
        turns: the user's messages, at least one, none empty.
    """

    question_id: str
    category: str
    turns: tuple[str, ...]


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read a prompt set.

    Args:
        path: JSONL, UTF-8; blank lines are skipped.
        limit: read only the first so many prompts.

    Raises:
        UserError: names the file, the line and what is wrong with it.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}: give 1 or more")
    try:
        with Path(path).open(encoding="utf-8") as lines:
            prompts = _parse(str(path), lines, limit)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}): give a JSONL file") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a JSONL file") from error
    if not prompts:
        raise UserError(f"{path} holds no prompts: give lines such as {_FORM}")
    return prompts


def _parse(name: str, lines: Iterable[str], limit: int | None) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if len(prompts) == limit:
            break
        if line.strip():
            prompts.append(_prompt(f"{name}, line {number}", line))
    return prompts


def _prompt(place: str, line: str) -> Prompt:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON ({error}): give {_FORM}") from error
    if not isinstance(found, dict):
        raise UserError(f"{place}: holds {type(found).__name__}, not an object: give {_FORM}")
    for key in ("question_id", "category", "turns"):
        if key not in found:
            raise UserError(f"{place}: has no {key!r}: give {_FORM}")
    question, category, turns = found["question_id"], found["category"], found["turns"]
    if not isinstance(question, str | int) or isinstance(question, bool):
        raise UserError(f"{place}: question_id is {question!r}: give a number or a text")
    if not isinstance(category, str):
        raise UserError(f"{place}: category is {category!r}: give a text")
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{place}: turns is {turns!r}: give a list of at least one text")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise UserError(f"{place}: a turn is {turn!r}: give a text that is not empty")
    return Prompt(str(question), category, tuple(turns))


def has_template(target: Target) -> bool:
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
    try:
        text = target.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **(options or {})
        )
    except TemplateError as error:
        raise UserError(f"the chat template of {target.name} refuses the chat: {error}") from error
    # the template writes its own special tokens
    return _encoded(target, text, add_special_tokens=False)


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
        return [text_ids(target, prompt.turns[0]) for prompt in prompts]
    return [chat_ids(target, [{"role": "user", "content": p.turns[0]}], options) for p in prompts]

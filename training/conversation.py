"""Conversation: one chat as it grows, its ids always those that the target read and wrote."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from training.forms import Form
from training.sources import Start


@dataclass(frozen=True)
class Part:
    """Ids that belong together: every answer in the very context it was given in.

    Args:
        ids: what the target read and wrote.
        mask: True where it wrote an answer.
        messages: how many of the conversation's messages they hold.
        states: the target's taps and last states of all ids but the last, as far as they are kept.
    """

    ids: list[int]
    mask: list[bool]
    messages: int
    states: tuple[Tensor | None, Tensor] | None = None


@dataclass
class Conversation:
    """One chat.

    Args:
        number: which one.
        start: how it begins.
        temperature: of its answers.
        messages: so far.
        text, ids, mask, states: of the part that grows.
        parts: earlier ones. There are some where a template renders the past in another way than
            it was answered in (thinking blocks that it takes out, say).
        finish_reason: of the last answer.
        dropped: why it is of no use, None if it is.
        ended: whether no turn follows.
    """

    number: int
    start: Start
    temperature: float
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    states: tuple[Tensor | None, Tensor] | None = None
    parts: list[Part] = field(default_factory=list)
    finish_reason: str = ""
    dropped: str | None = None
    ended: bool = False

    @property
    def going(self) -> bool:
        """Tell whether turns follow."""
        return not self.ended and self.dropped is None

    def say(self, role: str, content: str) -> None:
        """Append a message."""
        self.messages.append({"role": role, "content": content})

    def context(self, form: Form, text: str) -> list[int]:
        """Return the ids of a text: the conversation's own go on where the text goes on."""
        if self.ids and text.startswith(self.text):
            return self.ids + form.encode(text[len(self.text) :])
        return form.encode(text)

    def open_answer(self, form: Form) -> list[int]:
        """Go on to where the answer to the last message begins, and return the ids so far."""
        text = form.prompt(self.messages)
        ids = self.context(form, text)
        if not text.startswith(self.text):
            self.parts.append(Part(self.ids, self.mask, len(self.messages) - 1, self.states))
            self.mask = []
        self.mask = self.mask + [False] * (len(ids) - len(self.mask))
        self.ids, self.text = ids, text
        return ids

    def answer(self, ids: Sequence[int], text: str, content: str, finish_reason: str) -> None:
        """Append an answer.

        Args:
            ids: as they were sampled, the ending token included.
            text: of all ids.
            content: of the message, without the ending token.
            finish_reason: "stop" or "length".
        """
        self.say("assistant", content)
        self.text += text
        self.ids = self.ids + list(ids)
        self.mask = self.mask + [True] * len(ids)
        self.finish_reason = finish_reason

    def all_parts(self) -> list[Part]:
        """Return the earlier parts and the one that grew last."""
        return [*self.parts, Part(self.ids, self.mask, len(self.messages), self.states)]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row a part, as training/shards.py stores them."""
        name = self.start.name or f"{self.number:06d}"
        parts = self.all_parts()
        return [
            {
                "id": name if len(parts) == 1 else f"{name}.{count}",
                "ids": part.ids,
                "label_mask": part.mask,
                "messages": self.messages[: part.messages],
                "finish_reason": self.finish_reason if part is parts[-1] else "stop",
                "temperature": self.temperature,
                "category": self.start.category,
            }
            for count, part in enumerate(parts, start=1)
        ]

"""Forms: how a conversation becomes the text that a target reads.

A chat target reads its own chat template, rendered as a whole, so that nothing here knows any
markup; a base target reads plain text.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from drafters.errors import UserError
from inference.prompts import has_template, rendered
from inference.stop import Stop
from training.reader import ChatReader

Messages = Sequence[Mapping[str, str]]

_SENTINEL = "Q7x1Zk9Message"  # stands for a message whose place is looked for; one plain word


class Form(Protocol):
    """What asks a target for an answer."""

    def prompt(self, messages: Messages) -> str:
        """Return the text up to where the answer to the last message begins."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of such a text, or of a later part of it."""
        ...


class PlainText:
    """The text of the one message, to be continued.

    Args:
        target: whose tokenizer encodes.

    Raises:
        UserError: if there is none.
    """

    def __init__(self, target: ChatReader) -> None:
        """Keep the tokenizer."""
        if target.tokenizer is None:
            raise UserError(f"{target.name} has no tokenizer: give a target that reads text")
        self.tokenizer = target.tokenizer

    def prompt(self, messages: Messages) -> str:
        """Return the message as it is."""
        return messages[-1]["content"]

    def encode(self, text: str) -> list[int]:
        """Return ids as the tokenizer gives them by default, its opening token included."""
        return self.tokenizer(text)["input_ids"]


class ChatForm:
    """A target's chat template, also for messages that the target itself writes as the user.

    Args:
        target: with a chat template.
        options: passed to the template.

    Raises:
        UserError: if there is no template, or it does not show a user's message once, as it is.
    """

    def __init__(self, target: ChatReader, options: Mapping[str, Any]) -> None:
        """Look for the user's message in a rendering."""
        if not has_template(target):
            raise UserError(
                f"{target.name} has no chat template, so it can neither ask nor answer in a chat: "
                "give an instruct target, or --texts FILE with lines to continue"
            )
        self.tokenizer, self.eos_ids = target.tokenizer, target.eos_ids
        self.options, self.name = dict(options), target.name
        self._around([], generation=True)

    def prompt(self, messages: Messages) -> str:
        """Return the chat up to where the assistant's answer begins."""
        return self._render(messages, generation=True)

    def opening(self, messages: Messages) -> str:
        """Return the chat up to where the user's next message begins."""
        return self._around(messages, generation=False)[0]

    def encode(self, text: str) -> list[int]:
        """Return ids without anything added: the template writes its own special tokens."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens shown."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of tokens that are markup, never text."""
        known = self.tokenizer.added_tokens_decoder
        return frozenset(i for i, token in known.items() if token.special) | self.eos_ids

    @cached_property
    def closing(self) -> str:
        """Return what the template writes between a user's message and the answer."""
        return self._around([], generation=True)[1]

    @cached_property
    def user_stop(self) -> Stop:
        """Return what ends a user's message.

        That is the target's ending tokens and the special token that the template closes the
        message with; a template that closes it in plain text makes that text a stop string.
        """
        text = self.closing.strip()
        first = set(self.encode(self.closing)[:1])
        if not text or first <= self.special_ids:
            return Stop(self.eos_ids | (first & self.special_ids))
        return Stop(self.eos_ids, (text,), self.tokenizer)

    def _around(self, messages: Messages, *, generation: bool) -> tuple[str, str]:
        """Return what a rendering holds before and after a new user's message."""
        chat = [*messages, {"role": "user", "content": _SENTINEL}]
        parts = self._render(chat, generation=generation).split(_SENTINEL)
        if len(parts) != 2:
            raise UserError(
                f"the chat template of {self.name} shows a user's message {len(parts) - 1} times, "
                "not once as it is: the target cannot write it; give --prompts FILE"
            )
        return parts[0], parts[1]

    def _render(self, messages: Messages, *, generation: bool) -> str:
        return rendered(self, messages, add_generation_prompt=generation, **self.options)

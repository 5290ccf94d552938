"""From messages to ids and the mask of the answers' tokens, by the target's own chat template.

The mask follows from rendering, never from searching the text: either the template marks answers
itself (generation tags), or the chat is rendered once more up to each answer and the two renderings
are compared. An answer runs from the end of the generation prompt to the first ending token, which
belongs to it; what a template adds after that, the target never writes.
"""

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from drafters.errors import UserError

_ROLES = ("system", "user", "assistant")
_TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Refused(Exception):  # noqa: N818 - an answer about one chat, not a failure
    """A chat that cannot be rendered faithfully, and why."""


class Unstable(Refused):
    """A chat whose beginning is rendered otherwise once more turns follow."""


class Renderer:
    """Render chats for one target.

    Args:
        tokenizer: with a chat template.
        ends: ids that end an answer.
        options: passed to the template, as they were when the answers were generated.

    Raises:
        UserError: if there is no chat template.
    """

    def __init__(self, tokenizer: Any, ends: Set[int], options: Mapping[str, Any]) -> None:
        """Look at the template."""
        if tokenizer is None or not tokenizer.chat_template:
            raise UserError(
                "the target has no chat template, and the chats hold messages without ids: give "
                "chats with ids, or a target with a template"
            )
        self.tokenizer, self.ends, self.options = tokenizer, ends, dict(options)
        self.tagged = bool(_TAGS.search(str(tokenizer.chat_template)))

    def render(self, messages: object) -> tuple[list[int], list[bool]]:
        """Return a chat's ids and which of them are an answer's.

        Raises:
            Refused: the chat holds what templates treat in ways that cannot be checked.
            Unstable: a beginning of the chat is rendered otherwise than the whole.
        """
        chat = _checked(messages)
        return self._by_tags(chat) if self.tagged else self._by_prefixes(chat)

    def _by_tags(self, chat: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
        rendered = self.tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True, **self.options
        )
        ids = list(rendered["input_ids"])
        inside = [bool(x) for x in rendered["assistant_masks"]]
        mask = [False] * len(ids)
        ended = False
        for place, answered in enumerate(inside):
            ended = answered and ended
            mask[place] = answered and not ended
            ended = ended or (answered and ids[place] in self.ends)
        return ids, mask

    def _by_prefixes(self, chat: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
        whole = self._ids(chat)
        mask = [False] * len(whole)
        for turn, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            prompt = self._ids(chat[:turn], add_generation_prompt=True)
            upto = self._ids(chat[: turn + 1])
            if upto[: len(prompt)] != prompt:
                raise Unstable(f"the template's opening of answer {turn + 1} is not in the answer")
            end = self._end(upto, len(prompt))
            if whole[:end] != upto[:end]:
                raise Unstable(f"the template rewrites message {turn + 1} once more turns follow")
            mask[len(prompt) : end] = [True] * (end - len(prompt))
        return whole, mask

    def _end(self, ids: Sequence[int], start: int) -> int:
        """Return the place after an answer's first ending token, or the end of the ids."""
        for place in range(start, len(ids)):
            if ids[place] in self.ends:
                return place + 1
        return len(ids)

    def _ids(self, chat: list[dict[str, str]], *, add_generation_prompt: bool = False) -> list[int]:
        if not chat:
            # templates look at the first message; a chat that opens with an answer has no prompt
            raise Refused("the chat opens with an answer")
        rendered = self.tokenizer.apply_chat_template(
            chat, return_dict=True, add_generation_prompt=add_generation_prompt, **self.options
        )
        return list(rendered["input_ids"])


def _checked(messages: object) -> list[dict[str, str]]:
    """Return the messages if they hold nothing but roles and texts that every template knows."""
    if not isinstance(messages, list) or not messages:
        raise Refused("no list of messages")
    chat: list[dict[str, str]] = []
    for message in messages:
        if not isinstance(message, dict):
            raise Refused("a message is not an object with role and content")
        extra = sorted(k for k, v in message.items() if k not in ("role", "content") and v)
        if extra:
            raise Refused(f"a message has {', '.join(extra)} beside role and content")
        if message.get("role") not in _ROLES:
            raise Refused(f"a message has the role {message.get('role')!r}")
        if not isinstance(message.get("content"), str):
            raise Refused("a message's content is not text")
        chat.append({"role": message["role"], "content": message["content"]})
    return chat

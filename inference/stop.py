"""Stop: where a row's output ends, token by token, as Hugging Face's generate has it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inference.detokenize import BROKEN


@dataclass(frozen=True)
class Stop:
    """When to stop.

    Args:
        eos_ids: the row ends with the first of these, which is kept.
        strings: the row ends with the token that completes one of these strings; the token is
            kept whole.
        tokenizer: decodes for the strings; None if there are none.
    """

    eos_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    tokenizer: Any = field(default=None, compare=False)

    def cut(
        self, before: Sequence[int], tokens: Sequence[int], room: int
    ) -> tuple[int, str | None]:
        """Return how many of `tokens` are emitted after `before`, and why the row ends there.

        Args:
            before: prompt and output so far.
            tokens: what a round would emit.
            room: how many more tokens the row may emit, at least 1.
        """
        for index, token in enumerate(tokens):
            if token in self.eos_ids or self._completes(before, tokens[: index + 1]):
                return index + 1, "stop"
            if index + 1 == room:
                return room, "length"
        return len(tokens), None

    def _completes(self, before: Sequence[int], tokens: Sequence[int]) -> bool:
        """Tell whether the last of `tokens` brings the end of a stop string."""
        if not self.strings:
            return False
        reach = max(len(string.encode()) for string in self.strings) + len(tokens)
        context = [*before[-reach:], *tokens]
        old, new = (self.tokenizer.decode(ids) for ids in (context[:-1], context))
        known = len(old.rstrip(BROKEN))  # a token may finish a character
        return any(
            new.find(string, max(0, known - len(string) + 1)) >= 0 for string in self.strings
        )

"""Detokenize: text out of ids as they come, never half a character."""

from collections.abc import Sequence
from typing import Any

BROKEN = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns a growing sequence of ids into a growing text.

    A token may end inside a character, or change how its neighbour reads; text is therefore handed
    out only up to the last whole character, and every id is decoded beside those before it.

    Args:
        tokenizer: decodes; special tokens are left out.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Start without ids."""
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._context = 0  # ids before it are neither needed nor decoded again
        self._shown = 0  # ids before it have been handed out

    def push(self, ids: Sequence[int]) -> str:
        """Take in ids and return the text that became final."""
        self.ids.extend(ids)
        text = self._new_text()
        if text.endswith(BROKEN):
            return ""
        return self._hand_out(text)

    def flush(self) -> str:
        """Return what is left, broken or not: the sequence is over."""
        return self._hand_out(self._new_text())

    def _new_text(self) -> str:
        known = self._decode(self._context, self._shown)
        return self._decode(self._context, len(self.ids))[len(known) :]

    def _hand_out(self, text: str) -> str:
        if text:
            self._context, self._shown = self._shown, len(self.ids)
        return text

    def _decode(self, start: int, end: int) -> str:
        return self.tokenizer.decode(self.ids[start:end], skip_special_tokens=True)

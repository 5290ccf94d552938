"""Sampling: how outputs are drawn and where they end, checked before any model work."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from drafters.errors import UserError
from drafters.growth.base import check_at_least
from drafters.rules import Rules
from drafters.sampling import Warp, check_seed

Item = TypeVar("Item")


@dataclass(frozen=True)
class Sampling:
    """How outputs are drawn and where they end.

    Args:
        max_new_tokens: at most this many tokens a prompt.
        warp: how logits become laws.
        seed: of all rows; prompt number i draws from its own streams of it.
        stop_strings: texts that end an output.
        eos_ids: ids that end an output; None: the target's own.
        scores: whether outputs carry the score of every token.
    """

    max_new_tokens: int = 128
    warp: Warp = field(default_factory=Warp)
    seed: int = 0
    stop_strings: tuple[str, ...] = ()
    eos_ids: frozenset[int] | None = None
    scores: bool = False

    def __post_init__(self) -> None:
        """Check what no later stage would check before model work."""
        check_at_least(self.max_new_tokens, 1, "max_new_tokens")
        check_seed(self.seed)
        if not isinstance(self.warp, Warp):
            raise UserError(f"warp is {self.warp!r}: give drafters.sampling.Warp(...)")
        if isinstance(self.stop_strings, str):  # a sequence of texts too, of one character each
            raise UserError(f"stop_strings is one text: give ({self.stop_strings!r},)")
        for string in several("stop_strings", self.stop_strings, "texts"):
            _check_text(string)
        ends = () if self.eos_ids is None else several("eos_ids", self.eos_ids, "token ids")
        if isinstance(self.eos_ids, str) or not all(isinstance(end, int) for end in ends):
            raise UserError(f"eos_ids is {self.eos_ids!r}: give token ids")
        rules = self.warp.rules
        if not isinstance(rules, Rules | None):
            raise UserError(f"rules is {rules!r}: give drafters.rules.Rules(...), or leave it out")


def several(name: str, given: Iterable[Item], kind: str) -> tuple[Item, ...]:
    """Return what was given as a tuple.

    Raises:
        UserError: if it holds nothing that could be gone through.
    """
    if not isinstance(given, Iterable):
        raise UserError(f"{name} is {given!r}: give {kind}")
    return tuple(given)


def _check_text(string: object) -> None:
    if not isinstance(string, str) or not string:
        raise UserError(f"a stop string is {string!r}: give a text, or leave it out")
    if any("\ud800" <= character <= "\udfff" for character in string):
        raise UserError(f"a stop string holds what is no character ({string!r}): give UTF-8 text")

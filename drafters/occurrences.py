"""Occurrences: where the ends of a text occurred before, in documents that come and go.

Grams of a few lengths are entered as tokens come, so an end is looked up and never searched for;
the length of each match is then compared token by token. Documents leave oldest first, whole, when
a limit of tokens is exceeded. What to make of the matches is each drafter's business.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

GRAMS = (4, 2, 1)  # lengths that are entered: a match is looked up by the longest that occurred


@dataclass(frozen=True)
class Match:
    """An earlier place where the text's end occurred.

    Args:
        length: of the match, in tokens.
        document: its tokens, which may still grow.
        after: index of the token that followed there.
    """

    length: int
    document: Sequence[int]
    after: int

    def next(self, count: int) -> Sequence[int]:
        """Return up to so many tokens that followed."""
        return self.document[self.after : self.after + count]


class Occurrences:
    """An index of documents of tokens.

    Args:
        limit: tokens at most; the oldest documents leave first. None: no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        """Start without documents."""
        self.limit, self.size = limit, 0
        self.documents: deque[list[int]] = deque()
        self._where: dict[tuple[int, ...], deque[tuple[list[int], int]]] = {}

    def begin(self) -> None:
        """Begin a document; `extend` adds to it from now on."""
        self.documents.append([])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the newest document; what it ends with becomes known once it goes on."""
        document = self.documents[-1]
        for token in tokens:
            for gram in _ending_at(document, len(document)):
                self._where.setdefault(gram, deque()).append((document, len(document)))
            document.append(token)
        self.size += len(tokens)
        while self.limit is not None and self.size > self.limit:
            self._drop()

    def _drop(self) -> None:
        """Forget the oldest document: its entries are the oldest of every gram."""
        document = self.documents.popleft()
        for end in range(1, len(document)):
            for gram in _ending_at(document, end):
                places = self._where[gram]
                places.popleft()
                if not places:
                    del self._where[gram]
        self.size -= len(document)

    def matches(self, text: Sequence[int], most: int, reach: int) -> list[Match]:
        """Return where the end of a text occurred, the latest first.

        Args:
            text: whose end is looked up; may be a document itself.
            most: places at most: the latest of the longest entered gram that occurred.
            reach: tokens that are compared.
        """
        for gram in _ending_at(text, len(text)):
            places = self._where.get(gram)
            if places:
                return [
                    Match(_common(text, document, end, len(gram), reach), document, end)
                    for document, end in islice(reversed(places), most)
                ]
        return []


def _ending_at(tokens: Sequence[int], end: int) -> list[tuple[int, ...]]:
    """Return the grams of tokens[:end] that are entered, the longest first."""
    return [tuple(tokens[end - length : end]) for length in GRAMS if length <= end]


def _common(text: Sequence[int], document: Sequence[int], end: int, known: int, reach: int) -> int:
    """Return how many tokens before the end of `text` equal those before document[end]."""
    length, most = known, min(reach, len(text), end)
    while length < most and text[-1 - length] == document[end - 1 - length]:
        length += 1
    return length

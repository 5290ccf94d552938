"""Feed: many requests through one decoder whose batch stays full."""

from collections import deque
from collections.abc import Iterator, Sequence

from drafters.base import Commit
from inference.engine import Decoder, Request


class Feed:
    """Requests that take rows as rows come free; iterate it for commits as they come.

    Args:
        decoder: all of its rows are free.
        requests: served in this order.
    """

    def __init__(self, decoder: Decoder, requests: Sequence[Request]) -> None:
        """Let all of them wait."""
        self.decoder = decoder
        self._waiting = deque(enumerate(requests))
        self._serves: dict[int, int] = {}

    def __iter__(self) -> Iterator[tuple[int, Commit]]:
        """Yield (number of the request, commit) until all have ended."""
        while self._waiting or self.decoder.running:
            yield from self._named(self._admit())
            if self.decoder.running:
                yield from self._named(self.decoder.round())

    def abandon(self, number: int) -> None:
        """End a running request early."""
        self.decoder.release(next(r for r, served in self._serves.items() if served == number))

    def _admit(self) -> list[Commit | None]:
        """Give free rows to waiting requests."""
        running = set(self.decoder.running)
        taken: dict[int, Request] = {}
        for row in range(len(self.decoder.rows)):
            if row in running or not self._waiting:
                continue
            self.decoder.release(row)
            self._serves[row], taken[row] = self._waiting.popleft()
        return self.decoder.admit(taken) if taken else []

    def _named(self, commits: Sequence[Commit | None]) -> Iterator[tuple[int, Commit]]:
        for row, commit in enumerate(commits):
            if commit is not None:
                yield self._serves[row], commit

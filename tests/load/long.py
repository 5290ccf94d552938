"""Long: one answer as long as the context, drafted and plain."""

from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from drafters.base import Drafter
from drafters.sampling import RowRandom, Warp
from inference.engine import Request
from tests.load.soak import Load, output_of

PROMPT = [1, 2, 3]


@dataclass(frozen=True)
class Answer:
    """One greedy answer.

    Args:
        ids: its tokens.
        rounds: that it took.
        reserved: bytes of the cache before the first token.
        cache: bytes of the cache after the last.
        grown: bytes by which the process grew over the most that it held by a tenth of the answer.
        touched: bytes of the cache that were first written meanwhile; reserved until then.
    """

    ids: list[int]
    rounds: int
    reserved: int
    cache: int
    grown: int
    touched: int


def answers(load: Load, drafters: list[Drafter], tokens: int) -> Iterator[Answer]:
    """Decode one greedy answer of so many tokens with each drafter."""
    for drafter in drafters:
        one = Load(load.target, drafter, load.growth, Warp())
        decoder = one.decoder(1, len(PROMPT) + tokens)
        reserved = decoder.cache.store.untyped_storage().nbytes()
        request = Request(PROMPT, tokens, RowRandom(0))
        decoder.admit({0: request})
        memory: list[int] = []
        early = 0
        while decoder.running:
            decoder.round()
            memory.append(psutil.Process().memory_info().rss)
            if not early and len(output_of(decoder, 0, request)) >= tokens / 10:
                early = len(memory)
        yield Answer(
            output_of(decoder, 0, request),
            len(memory),
            reserved,
            decoder.cache.store.untyped_storage().nbytes(),
            max(memory) - max(memory[:early]),
            reserved * 9 // 10,
        )

"""Soak: an engine that is kept busy, and what must hold of it all the while."""

import random
import time
from dataclasses import dataclass, field

import psutil

from drafters.base import Drafter
from drafters.growth import Growth
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from inference.engine import Decoder, Request
from inference.stop import Stop

LONGEST = 24  # tokens of a prompt, and of an answer


@dataclass
class Soaked:
    """What an engine did.

    Args:
        requests: prompt, budget and number of every request that ended.
        outputs: their tokens, in the same order.
        released: requests taken out before their end.
        committed: tokens that the rounds and prefills emitted, of whatever request.
        memory: bytes of this process, every tenth of the time.
    """

    requests: list[Request] = field(default_factory=list[Request])
    outputs: list[list[int]] = field(default_factory=list[list[int]])
    released: int = 0
    committed: int = 0
    memory: list[int] = field(default_factory=list[int])


@dataclass(frozen=True)
class Load:
    """An engine's parts.

    Args:
        target, drafter, growth, warp: as Decoder takes them.
    """

    target: Target
    drafter: Drafter
    growth: Growth
    warp: Warp

    def decoder(self, rows: int, capacity: int = 2 * LONGEST) -> Decoder:
        """Return an engine without an ending but lengths."""
        return Decoder(
            self.target,
            self.drafter,
            self.growth,
            rows=rows,
            capacity=capacity,
            warp=self.warp,
            stop=Stop(),
        )

    def alone(self, request: Request, number: int) -> list[int]:
        """Decode one request in an engine of its own."""
        single = self.decoder(1)
        single.admit({0: Request(request.prompt, request.max_new_tokens, RowRandom(0, number))})
        while single.running:
            single.round()
        return _output(single, 0, request)


def soak(load: Load, rows: int, seconds: float, seed: int = 0) -> tuple[Soaked, list[int]]:
    """Keep an engine busy; return what it did, and the number of every request that ended."""
    source, done = random.Random(seed), Soaked()
    decoder, serves = load.decoder(rows), dict[int, tuple[int, Request]]()
    started, numbers, count = time.monotonic(), list[int](), 0
    vocabulary = load.target.shape.vocab_size
    while (spent := time.monotonic() - started) < seconds:
        if spent >= seconds * len(done.memory) / 10:
            done.memory.append(psutil.Process().memory_info().rss)
        arrived: dict[int, Request] = {}
        for row in set(range(rows)) - set(serves):
            if source.random() < 0.3:
                prompt = [source.randrange(vocabulary) for _ in range(source.randint(1, LONGEST))]
                arrived[row] = Request(prompt, source.randint(1, LONGEST), RowRandom(0, count))
                serves[row] = count, arrived[row]
                count += 1
        commits = decoder.admit(arrived) if arrived else []
        done.committed += sum(len(c.emitted) for c in commits if c is not None)
        if decoder.running:
            done.committed += sum(len(c.emitted) for c in decoder.round() if c is not None)
        for row, (number, request) in list(serves.items()):
            ended = row not in decoder.running
            if ended or source.random() < 0.01:
                if ended:
                    done.requests.append(request)
                    done.outputs.append(_output(decoder, row, request))
                    numbers.append(number)
                else:
                    done.released += len(_output(decoder, row, request))
                decoder.release(row)
                del serves[row]
    for row, (_, request) in serves.items():
        done.released += len(_output(decoder, row, request))
    return done, numbers


def _output(decoder: Decoder, row: int, request: Request) -> list[int]:
    held = decoder.rows[row]
    assert held is not None
    return list(held.ids[len(request.prompt) :])

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


@dataclass(frozen=True)
class Served:
    """A request that ended.

    Args:
        number: of its coins.
        prompt: its token ids.
        output: all of max_new_tokens.
    """

    number: int
    prompt: list[int]
    output: list[int]

    @property
    def request(self) -> Request:
        """Return it as it arrived; a Request that is kept keeps 10 KB of random state."""
        return Request(self.prompt, len(self.output), RowRandom(0, self.number))


@dataclass
class Soaked:
    """What an engine did.

    Args:
        requests: how many ended.
        ended: their tokens.
        short: of them those that ended before their budget.
        released: tokens of requests that were taken out before their end.
        committed: tokens that the rounds and prefills emitted, of whatever request.
        sample: requests that ended, each as likely to be among them as any other.
        memory: bytes of this process, every tenth of the time and at the end.
    """

    requests: int = 0
    ended: int = 0
    short: int = 0
    released: int = 0
    committed: int = 0
    sample: list[Served] = field(default_factory=list[Served])
    memory: list[int] = field(default_factory=list[int])

    @property
    def lost(self) -> int:
        """Return tokens that were emitted and belong to no request."""
        return self.committed - self.ended - self.released

    @property
    def grown(self) -> int:
        """Return the bytes by which memory grew in the second half."""
        return self.memory[-1] - self.memory[len(self.memory) // 2]

    def end(self, served: Served, budget: int, most: int, source: random.Random) -> None:
        """Count a request and keep it with the probability that all have."""
        place = self.requests if self.requests < most else source.randint(0, self.requests)
        if place < most:
            self.sample[place : place + 1] = [served]
        self.requests += 1
        self.ended += len(served.output)
        self.short += len(served.output) != budget


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

    def alone(self, request: Request) -> list[int]:
        """Decode one request in an engine of its own."""
        single = self.decoder(1)
        single.admit({0: request})
        while single.running:
            single.round()
        return output_of(single, 0, request)


def soak(load: Load, rows: int, seconds: float, seed: int = 0, sample: int = 300) -> Soaked:
    """Keep an engine busy with random arrivals and lengths, and rows that leave early."""
    source, done, kept = random.Random(seed), Soaked(), random.Random(seed)
    decoder, serves = load.decoder(rows), dict[int, tuple[int, Request]]()
    started, count = time.monotonic(), 0
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
        commits += decoder.round() if decoder.running else []
        done.committed += sum(len(c.emitted) for c in commits if c is not None)
        for row, (number, request) in list(serves.items()):
            ended = row not in decoder.running
            if ended or source.random() < 0.01:
                output = output_of(decoder, row, request)
                if ended:
                    served = Served(number, list(request.prompt), output)
                    done.end(served, request.max_new_tokens, sample, kept)
                else:
                    done.released += len(output)
                decoder.release(row)
                del serves[row]
    done.released += sum(len(output_of(decoder, row, r)) for row, (_, r) in serves.items())
    done.memory.append(psutil.Process().memory_info().rss)
    return done


def output_of(decoder: Decoder, row: int, request: Request) -> list[int]:
    """Return what a row has emitted so far."""
    held = decoder.rows[row]
    assert held is not None
    return list(held.ids[len(request.prompt) :])

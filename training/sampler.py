"""Sampler: many prompts through the engine in one batch that stays full.

A row that ends is given to the next prompt at once. Each prompt has its own randomness, so what it
gets does not depend on its neighbours (but for rounding: kernels add up in another order for
another number of rows).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drafters.base import Commit
from drafters.growth import Chain
from drafters.registry import build_drafter
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from inference.engine import Decoder, Request
from inference.stop import Stop

ABANDONED = "abandoned"
_FIRST_LOOK, _EVERY = 64, 32  # tokens before the first look at a running sample, and between looks


@dataclass(frozen=True)
class Job:
    """One prompt and its randomness."""

    prompt: list[int]
    random: RowRandom


@dataclass
class Sample:
    """What one job got.

    Args:
        ids: emitted tokens, an ending token included.
        finish_reason: "stop", "length" or "abandoned".
    """

    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True)
class Law:
    """How all samples of a run are drawn and where they end.

    Args:
        warp: how logits become laws.
        stop: what ends a sample.
        max_new_tokens: at most this many tokens.
        hopeless: asked about a running sample now and then; True abandons it.
    """

    warp: Warp
    stop: Stop
    max_new_tokens: int
    hopeless: Callable[[Sequence[int]], bool] | None = None


class Sampler:
    """Plain decoding of many prompts.

    Args:
        target: writes.
        rows: how many prompts decode together.
        tick: told how many tokens each round brought.
    """

    def __init__(self, target: Target, rows: int, tick: Callable[[int], None]) -> None:
        """Keep what every run needs."""
        self.target, self.rows, self.tick = target, rows, tick
        self.drafter = build_drafter("none", {}, target.shape)

    def run(self, jobs: Sequence[Job], law: Law) -> list[Sample]:
        """Decode all jobs to their ends; samples in the order of the jobs."""
        if not jobs:
            return []
        run = _Run(self, jobs, law)
        while run.waiting or run.decoder.running:
            self.tick(run.take(run.admit()))
            if run.decoder.running:
                self.tick(run.take(run.decoder.round()))
        return run.samples


class _Run:
    def __init__(self, sampler: Sampler, jobs: Sequence[Job], law: Law) -> None:
        self.jobs, self.law = jobs, law
        self.decoder = Decoder(
            sampler.target,
            sampler.drafter,
            Chain(1),
            rows=min(sampler.rows, len(jobs)),
            capacity=max(len(job.prompt) for job in jobs) + law.max_new_tokens,
            warp=law.warp,
            stop=law.stop,
        )
        self.samples = [Sample() for _ in jobs]
        self.waiting = deque(range(len(jobs)))
        self.serves: dict[int, int] = {}

    def admit(self) -> list[Commit | None]:
        """Give free rows to waiting jobs."""
        running = set(self.decoder.running)
        requests: dict[int, Request] = {}
        for row in range(len(self.decoder.rows)):
            if row in running or not self.waiting:
                continue
            self.decoder.release(row)
            self.serves[row] = number = self.waiting.popleft()
            job = self.jobs[number]
            requests[row] = Request(job.prompt, self.law.max_new_tokens, job.random)
        return self.decoder.admit(requests) if requests else []

    def take(self, commits: Sequence[Commit | None]) -> int:
        """Add what came to the samples, and return how many tokens came."""
        count = 0
        for row, commit in enumerate(commits):
            if commit is None:
                continue
            sample = self.samples[self.serves[row]]
            sample.ids.extend(commit.emitted)
            sample.finish_reason = commit.finished
            count += len(commit.emitted)
            if commit.finished is None and self._hopeless(sample.ids):
                sample.finish_reason = ABANDONED
                self.decoder.release(row)
        return count

    def _hopeless(self, ids: Sequence[int]) -> bool:
        if self.law.hopeless is None or len(ids) < _FIRST_LOOK or len(ids) % _EVERY:
            return False
        return self.law.hopeless(ids)

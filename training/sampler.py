"""Samplers: what gives every one of many prompts its continuation.

The one here runs them through the engine in one batch that stays full; a server does it in
training/remote.py. Each prompt has its own randomness, so what it gets does not depend on its
neighbours (but for rounding: kernels add up in another order for another number of rows).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from drafters.base import Commit, Features
from drafters.growth import Chain
from drafters.registry import build_drafter
from drafters.sampling import Warp
from drafters.target import Target
from inference.engine import Decoder, Request
from inference.feed import Feed
from inference.stop import Stop

ABANDONED = "abandoned"
_FIRST_LOOK, _EVERY = 64, 32  # tokens before the first look at a running sample, and between looks


@dataclass(frozen=True)
class Law:
    """How all samples of a run are drawn and where they end.

    Args:
        warp: how logits become laws.
        stop: what ends a sample.
        hopeless: asked about a running sample now and then; True abandons it.
        features: what is kept of the target's states.
        dtype: what they are rounded to.
    """

    warp: Warp
    stop: Stop
    hopeless: Callable[[Sequence[int]], bool] | None = None
    features: Features = field(default_factory=Features)
    dtype: torch.dtype = torch.bfloat16

    def gives_up(self, ids: Sequence[int]) -> bool:
        """Tell whether to abandon a running sample."""
        if self.hopeless is None or len(ids) < _FIRST_LOOK or len(ids) % _EVERY:
            return False
        return self.hopeless(ids)


@dataclass
class Sample:
    """What one request got.

    Args:
        ids: emitted tokens, an ending token included.
        finish_reason: "stop", "length" or "abandoned".
        misread: whether the ids were read from a text that does not hold them for certain.
        taps, last: states of prompt and sample without the sample's last token, which the target
            wrote and did not read; in pieces [m, K * D] and [m, D], as far as they are kept.
    """

    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    misread: bool = False
    taps: list[Tensor] = field(default_factory=list)
    last: list[Tensor] = field(default_factory=list)

    def add(self, commit: Commit, dtype: torch.dtype) -> None:
        """Take in one commit."""
        self.ids.extend(commit.emitted)
        self.finish_reason = commit.finished
        for kept, states in ((self.taps, commit.taps), (self.last, commit.last)):
            if states is not None:
                kept.append(states.to("cpu", dtype))


Tick = Callable[[int], None]
"""Told how many tokens came."""


class Sampler(Protocol):
    """What decodes many prompts."""

    @property
    def context(self) -> int:
        """Return how many tokens a prompt and its sample may have together."""
        ...

    def run(self, requests: Sequence[Request], law: Law, tick: Tick) -> list[Sample]:
        """Decode all requests to their ends; samples in their order."""
        ...


class EngineSampler:
    """Plain decoding of many prompts by a target of this process.

    Args:
        target: writes.
        rows: how many prompts decode together.
    """

    def __init__(self, target: Target, rows: int) -> None:
        """Keep what every run needs."""
        self.target, self.rows = target, rows
        self.drafter = build_drafter("none", {}, target.shape)

    @property
    def context(self) -> int:
        """Return how many tokens a prompt and its sample may have together."""
        return self.target.shape.max_positions

    def run(self, requests: Sequence[Request], law: Law, tick: Tick) -> list[Sample]:
        """Decode all requests to their ends; samples in their order."""
        if not requests:
            return []
        decoder = Decoder(
            self.target,
            self.drafter,
            Chain(1),
            rows=min(self.rows, len(requests)),
            capacity=max(len(request.prompt) + request.max_new_tokens for request in requests),
            warp=law.warp,
            stop=law.stop,
        )
        decoder.session.features = law.features  # commits carry what the session asks for
        feed = Feed(decoder, requests)
        samples = [Sample() for _ in requests]
        for number, commit in feed:
            sample = samples[number]
            sample.add(commit, law.dtype)
            tick(len(commit.emitted))
            if commit.finished is None and law.gives_up(sample.ids):
                sample.finish_reason = ABANDONED
                feed.abandon(number)
        return samples

"""Peer: somebody else's decoding of the same prompts, timed in the same turns as ours.

A drafter's speed-up is one over our own plain decoding. What plain decoding is worth beside what
people come from is a figure of its own: the two are never multiplied.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from drafters.errors import UserError
from drafters.sampling import Warp
from drafters.target import Target


@dataclass(frozen=True)
class PeerOutput:
    """What one prompt got; prompts that were answered together share the time evenly.

    Args:
        ids: new tokens.
        decoded: how many of them came after the first step, which holds the prefill.
        seconds: of those.
        total_seconds: the prefill included.
    """

    ids: list[int]
    decoded: int
    seconds: float
    total_seconds: float


@dataclass
class Peer(ABC):
    """One way to decode, and what it did.

    Args:
        name: KIND, or KIND-MORE for what speculates: it is held against the peer KIND.
        outputs: by prompt, one a repeat.
    """

    name: str
    outputs: dict[int, list[PeerOutput]] = field(default_factory=dict[int, list[PeerOutput]])

    @property
    def plain(self) -> str:
        """Return the name of the peer that is its own plain decoding."""
        return self.name.partition("-")[0]

    @abstractmethod
    def check_rows(self, rows: int) -> None:
        """Raise UserError if so many prompts cannot be answered together."""

    @abstractmethod
    def decode(
        self, target: Target, prompts: Sequence[Sequence[int]], most: int, warp: Warp, seed: int
    ) -> list[PeerOutput]:
        """Answer prompts together, with at most so many new tokens each.

        Raises:
            UserError: if it cannot.
        """

    def take(self, prompts: Sequence[int], outputs: Sequence[PeerOutput]) -> None:
        """Keep what prompts got."""
        for prompt, output in zip(prompts, outputs, strict=True):
            self.outputs.setdefault(prompt, []).append(output)


def refuse_rules(warp: Warp) -> None:
    """Refuse what no peer is measured with.

    Raises:
        UserError: if the warp has rules.
    """
    if warp.rules is not None:
        raise UserError("peers are measured without penalties, biases or constraints: drop either")

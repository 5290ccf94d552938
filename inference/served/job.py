"""Job and Served: what an engine is asked to decode, and what it says of it."""

from dataclasses import dataclass, replace
from pathlib import Path

from drafters.formats.served import Serving


@dataclass(frozen=True)
class Job:
    """Greedy decoding of some prompts.

    Args:
        target: folder in Hugging Face format.
        prompts: token ids.
        max_new_tokens: of each prompt.
        dtype: that the engine computes in, float32 or bfloat16.
        threads: of the CPU.
        drafter: its folder in a format that the engine reads; None: plain decoding.
        method: what the engine calls the drafter's kind.
        gamma: tokens drafted a round, in a chain.
    """

    target: Path
    prompts: list[list[int]]
    max_new_tokens: int
    dtype: str
    threads: int
    drafter: Path | None = None
    method: str = ""
    gamma: int = 0

    def drafted(self, drafter: Path, way: Serving, gamma: int) -> "Job":
        """Return the same job with a drafter."""
        return replace(self, drafter=drafter, method=way.method, gamma=gamma)


@dataclass(frozen=True)
class Served:
    """What an engine did.

    Args:
        version: of the engine.
        outputs: token ids of each prompt.
        seconds: decoding them took, prefills included.
        rounds: proposals that it verified; None where it does not say.
        drafted, accepted: tokens in them.
        accepted_at: of all rounds, how many accepted position 1, 2, ..; None where it does not say.
        by_round: of each prompt, drafted and emitted ids round by round, the last round before it
            is cut at the output's end; None where it does not say.
    """

    version: str
    outputs: list[list[int]]
    seconds: float
    rounds: int | None = None
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] | None = None
    by_round: list[list[tuple[list[int], list[int]]]] | None = None

    @property
    def tokens_per_second(self) -> float:
        """Return emitted tokens over seconds, prefills included."""
        return sum(map(len, self.outputs)) / self.seconds

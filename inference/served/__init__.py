"""Served: an exported drafter in somebody else's engine, and what came out.

An engine runs apart from this process (docs/serving.md says how it is built): a file each says how
it is started and how its counters are read. One prompt decodes at a time, greedily, so that the
figures are those of latency.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from drafters.cache_root import cache_root
from drafters.errors import UserError
from inference.served import llama_cpp, vllm
from inference.served.job import Job, Served

__all__ = ["ENGINES", "Engine", "ForeignEngine", "Job", "Served"]


class ForeignEngine(StrEnum):
    """Somebody else's engines that can be built here."""

    vllm = "vllm"
    llama_cpp = "llama.cpp"


class Runner(NamedTuple):
    """What knows one engine: where its program lies below a root, and how a job is run."""

    program: Callable[[Path], Path]
    run: Callable[[Path, Job], Served]


ENGINES: dict[str, Runner] = {
    ForeignEngine.vllm: Runner(vllm.program, vllm.run),
    ForeignEngine.llama_cpp: Runner(llama_cpp.program, llama_cpp.run),
}


@dataclass(frozen=True)
class Engine:
    """An engine that was built on this machine.

    Args:
        name: one of ENGINES.
        root: folder that the engines were built in.

    Raises:
        UserError: if there is no such engine, or it is not built.
    """

    name: str
    root: Path

    def __post_init__(self) -> None:
        """Look for its program."""
        if self.name not in ENGINES:
            raise UserError(f"engine {self.name!r}: give {' or '.join(ENGINES)}")
        ENGINES[self.name].program(self.root)

    @classmethod
    def built(cls, name: str, root: Path | None = None) -> "Engine":
        """Return an engine below a root; None: where `make engines` builds."""
        return cls(name, root or cache_root() / "engines")

    @property
    def threads(self) -> int:
        """Return how many processors this process may use."""
        return len(vllm.processors())

    def run(self, job: Job) -> Served:
        """Run a job, with or without a drafter.

        Raises:
            UserError: if the engine refuses the job; says what it printed last.
        """
        return ENGINES[self.name].run(self.root, job)

"""Served: an exported drafter in somebody else's engine, and what came out.

An engine runs apart from this process (docs/serving.md says how it is built): a file each says how
it is started and how its counters are read. One prompt decodes at a time, greedily, so that the
figures are those of latency.
"""

from collections.abc import Callable
from pathlib import Path

from drafters.errors import UserError
from inference.served import llama_cpp, vllm
from inference.served.job import Job, Served

__all__ = ["ENGINES", "Job", "Served", "run_engine"]

ENGINES: dict[str, Callable[[Path, Job], Served]] = {"vllm": vllm.run, "llama.cpp": llama_cpp.run}


def run_engine(name: str, root: Path, job: Job) -> Served:
    """Run a job in an engine.

    Args:
        name: one of ENGINES.
        root: folder that the engines were built in.
        job: what to decode, with or without a drafter.

    Raises:
        UserError: if there is no such engine, it is not built, or it refuses the job; says what it
            printed last.
    """
    if name not in ENGINES:
        raise UserError(f"engine {name!r}: give {' or '.join(ENGINES)}")
    return ENGINES[name](root, job)

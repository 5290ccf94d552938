"""vLLM's CPU build: started in its own interpreter with a job, read back as one JSON line."""

import json
import os
import re
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path

from drafters.errors import UserError
from inference.served.job import Job, Served

_WORKER = Path(__file__).with_name("vllm_worker.py")
_CACHE_GIB = "1"
_MOST_SECONDS = 3600
_LOGGED = re.compile(r"^\(\w+ pid=\d+\) (\w+ [\d-]+ [\d:]+ \[[^]]+\] ?)?")  # another process's line


def program(root: Path) -> Path:
    """Return vLLM's interpreter.

    Raises:
        UserError: if vLLM is not built here.
    """
    python = root / "vllm" / "bin" / "python"
    if not python.exists():
        raise UserError(f"vLLM is not in {root}: run `make engines`")
    return python


def run(root: Path, job: Job) -> Served:
    """Decode a job.

    Raises:
        UserError: if vLLM is not built here, or ended without an answer.
    """
    python = program(root)
    with tempfile.TemporaryDirectory() as work:
        answer = Path(work) / "answer.json"
        try:
            done = subprocess.run(
                [str(python), str(_WORKER), str(answer)],
                input=json.dumps(asdict(job), default=str),
                # one process: functions can be sent to what holds the model
                env=environment(root, job.threads) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                cwd=work,
                capture_output=True,
                text=True,
                check=False,
                timeout=_MOST_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(f"vLLM took more than {_MOST_SECONDS} s: give it less to do") from error
        if done.returncode or not answer.exists():
            raise UserError(
                f"vLLM refused {job.method or 'the target'}: {reason(done.stdout + done.stderr)}"
            )
        return Served(**json.loads(answer.read_text()))


def processors() -> list[int]:
    """Return the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def environment(root: Path, threads: int) -> dict[str, str]:
    """Return the environment variables of a process of vLLM's: nothing of our own packages.

    Args:
        root: folder that the engines were built in.
        threads: of the CPU.
    """
    openmp = root / "vllm" / "lib" / "libiomp5.so"
    own = {
        "VLLM_CPU_KVCACHE_SPACE": _CACHE_GIB,
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors()[:threads])),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONSAFEPATH": "1",  # this folder has a vllm.py too
    }
    if openmp.exists():
        own["LD_PRELOAD"] = str(openmp)
    # vLLM pins another transformers
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | own


def reason(text: str) -> str:
    """Return the first error behind a traceback: its root, in whichever process; else a last line.

    One without a message is given with the line of code that raised it.
    """
    lines = [_LOGGED.sub("", line).strip() for line in text.splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if line.startswith("Traceback")), len(lines))
    for i, line in enumerate(lines[start:], start):
        if re.fullmatch(r"[\w.]*(Error|Exception)", line):
            return f"{line}: {lines[i - 1]}"[:400]
        if re.search(r"Error: \d+ validation errors? for ", line):
            return f"{line}: {' '.join(lines[i + 1 : i + 2])}"[:400]  # pydantic says which below
        if re.match(r"[\w.]*(Error|Exception): ", line):
            return line[:400]
    return (lines or ["it printed nothing"])[-1][:400]

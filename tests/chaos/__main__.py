"""Stop every command at random moments; see the package."""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tests.chaos.faults import KILLED, KINDS, Faults
from tests.chaos.jobs import Job, jobs

LONGEST = 120.0  # seconds a call may take before it hangs
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run: its steps on the disk, its seconds, and its result."""

    steps: int
    seconds: float
    result: dict[str, str]


def main(
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
    kills: Annotated[int, typer.Option(help="Signals at random moments.")] = 30,
    faults: Annotated[int, typer.Option(help="Steps on the disk that go wrong.")] = 170,
    case: Annotated[int, typer.Option(help="Only this case; -1: all.")] = -1,
    only: Annotated[str, typer.Option(help="Only this command.")] = "",
) -> None:
    """Stop commands at random moments, call them again, and compare with an uninterrupted run."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        root = Path(folder)
        inputs = root / "inputs"
        inputs.mkdir()
        known = [job for job in jobs(inputs) if only in ("", job.name)]
        out = root / "work" / "out"
        references = {job.name: _reference(job, out) for job in known}
        for name, found in references.items():
            typer.echo(f"{name}: {found.steps} steps on the disk, {found.seconds:.1f} s")
        for number in range(kills + faults):
            if case in (-1, number):
                source = random.Random(f"{seed}/{number}")
                job = known[number % len(known)]
                told = _one(job, references[job.name], source, out, killed=number < kills)
                typer.echo(f"case {number} of seed {seed}: {job.name}, {told}")
                failed += [f"case {number}: {job.name}, {told}"] if "FAILED" in told else []
    typer.echo(f"{len(failed)} failed of {1 if case >= 0 else kills + faults}")
    sys.exit(1 if failed else 0)


def _reference(job: Job, out: Path) -> Reference:
    _fresh(job, out)
    steps = out.parent.with_name("steps")

    def counted() -> int:
        faults = Faults(out.parent)
        faults.install()
        code = job.run(out)
        steps.write_text(str(faults.steps))
        return code

    start = time.monotonic()
    code, told = _child(counted, steps.with_name("told"))
    seconds = time.monotonic() - start
    if code != 0:
        raise SystemExit(f"{job.name} fails undisturbed: {told}")
    return Reference(int(steps.read_text()), seconds, _result(job, out))


def _fresh(job: Job, out: Path) -> None:
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir()
    job.prepare(out)


def _one(job: Job, reference: Reference, source: random.Random, out: Path, *, killed: bool) -> str:
    log = out.parent.with_name("told")
    _fresh(job, out)
    if killed:
        kind = source.choice(SIGNALS)
        after = source.uniform(0, reference.seconds)
        what = f"{kind.name} after {after:.2f} s"
        code, told = _child(lambda: job.run(out), log, kind, after)
        allowed = {-kind, 128 + kind, 0}
    else:
        kind = source.choice(KINDS)
        at = source.randint(1, reference.steps)
        what = f"{kind} at step {at} of {reference.steps}"

        def faulty() -> int:
            Faults(out.parent, kind, at).install()
            return job.run(out)

        code, told = _child(faulty, log)
        allowed = {"f": {0, 2}, "c": {130, 0}, "k": {KILLED}}[kind[0]]
    problems = [f"ended with {code}: {told}"] if code not in allowed else []
    problems += _left(job, out, swept="kill" not in what.lower())
    code, told = _child(lambda: job.run(out), log)
    if code not in job.again:
        problems.append(f"called again it ended with {code}: {told}")
    elif (now := _result(job, out)) != reference.result:
        wrong = [k for k in now | reference.result if now.get(k) != reference.result.get(k)]
        problems.append(f"another result: {wrong}")
    problems += _left(job, out, swept=True)
    return f"{what}: {'FAILED ' + '; '.join(problems) if problems else 'ok'}"


def _left(job: Job, out: Path, *, swept: bool) -> list[str]:
    """Say what is wrong with what a stopped command left."""
    code, told = _child(lambda: job.check(out) or 0, out.parent.with_name("told"))
    problems = [f"not readable: {told}"] if code else []
    parts = [file.name for file in out.parent.rglob(".*.part")] if swept else []
    return problems + ([f"left {parts}"] if parts else [])


def _result(job: Job, out: Path) -> dict[str, str]:
    file = out.parent.with_name("result")

    def written() -> int:
        file.write_text(json.dumps(job.result(out)))
        return 0

    code, told = _child(written, out.parent.with_name("told"))
    return json.loads(file.read_text()) if code == 0 else {"no result": told}


def _child(
    work: Callable[[], Any], log: Path, kind: signal.Signals | None = None, after: float = 0
) -> tuple[int, str]:
    """Run work in a process of its own; return how it ended and the last that it said."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            stream = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            code = work()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    start, sent = time.monotonic(), kind is None
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        spent = time.monotonic() - start
        if kind is not None and not sent and spent >= after:
            os.kill(pid, kind)
            sent = True
        if spent > LONGEST:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 1, "it hangs"
        time.sleep(0.005)
    said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return os.waitstatus_to_exitcode(status), " | ".join(said[-3:])


if __name__ == "__main__":
    typer.run(main)

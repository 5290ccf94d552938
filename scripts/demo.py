"""The main job: fetch the target, train drafters on chats it wrote, measure what they are worth.

    python scripts/demo.py              # under 25 minutes on two cores, from nothing
    python scripts/demo.py --quick      # tiny sizes: does everything run?
    python scripts/demo.py --bench      # every shape of what was trained, on all prompts
    python scripts/demo.py --fresh      # the target writes its chats first

A step that is done is skipped, a training that was stopped goes on. The steps are command lines in
configs/demo/*.yaml; each can be run by hand.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from omegaconf import MISSING

from console import app, note, run
from drafters import embedded
from drafters.errors import UserError
from drafters.settings import configs_dir, find_config, load
from drafters.whole import check_place, write_text
from inference import report
from training.commandline import Screen

cli = app(__doc__ or "")

ROOT = Path(__file__).parent.parent


@dataclass
class Plan:
    """The steps of a demo, as command lines.

    Args:
        out: where everything lies.
        results: where benchmark.json lies.
        target: folder of the target; empty: the embedded one.
        fresh: makes chats, for --fresh.
        common: what every training starts with: its script and settings.
        train: one training a drafter, by the name of its folder.
        benchmark: options of the benchmark.
    """

    out: str = MISSING
    results: str = "{out}"
    target: str = ""
    fresh: str = MISSING
    common: str = ""
    train: dict[str, str] = field(default_factory=dict)
    benchmark: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One command that is run once.

    Args:
        name: of its stamp, and for people.
        result: a file or folder that it leaves.
        command: what is started.
        own: a folder that belongs to this step alone, emptied when the command has changed.
        quiet: whether what it prints is dropped.
    """

    name: str
    result: Path
    command: list[str]
    own: Path | None = None
    quiet: bool = False


@cli.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, under 3 minutes.")] = False,
    bench: Annotated[bool, typer.Option("--bench", help="Every shape, all prompts.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Make the chats first.")] = False,
    plan: Annotated[list[Path] | None, typer.Option(help="Own plans instead (YAML).")] = None,
    out: Annotated[Path | None, typer.Option(help="Where everything lies.")] = None,
) -> int:
    """Fetch the target, train drafters on chats it wrote, measure what they are worth."""
    names = ["demo/quick.yaml" if quick else "demo/full.yaml"]
    names += ["demo/bench.yaml"] if bench else []
    steps = load(Plan, [find_config(path) for path in plan or names])
    if out is not None:
        check_place(out, folder=True)
    folder = out.resolve() if out else Path(steps.out + ("-fresh" if fresh else ""))
    os.chdir(ROOT)  # the plans' paths start here
    target = steps.target or str(embedded.fetch(say=note))
    chats = folder / "chats" if fresh else configs_dir() / "chats"
    values = {"target": target, "out": str(folder), "chats": str(chats)}
    results = Path(_filled(steps.results, values)[0])
    for step in _steps(steps, values, results, fresh=fresh):
        code = _once(step, folder / "steps")
        if code:
            note(f"{step.name} ended with exit code {code}; what is done stays done, run again")
            if code == 1 and step.quiet:  # it measured, and found its figures unfit for use
                _show(results / report.FILE)
            return code
    _show(results / report.FILE)
    return 0


def _steps(plan: Plan, values: dict[str, str], results: Path, *, fresh: bool) -> list[Step]:
    out, chats = Path(values["out"]), Path(values["chats"])
    steps = [Step("chats", chats, _python(plan.fresh, values), chats)] if fresh else []
    launch = [_accelerate(), "launch", "--config_file", "configs/accelerate/cpu.yaml"]
    launch.append(f"--num_cpu_threads_per_process={os.cpu_count()}")
    for name, line in plan.train.items():
        folder = out / name
        where = [f"target={values['target']}", f"output={folder}", f"data.path={chats}"]
        script, *settings = _filled(f"{plan.common} {line}", values)
        command = [*launch, script, *where, *settings, "resume=true"]
        steps.append(Step(f"train {name}", folder / "best" / "config.json", command, folder))
    options = [piece for line in plan.benchmark for piece in _filled(line, values)]
    command = [sys.executable, "scripts/benchmark.py", "--target", values["target"], *options]
    command += ["--out", str(results)]
    name = f"benchmark {results.name}"
    steps.append(Step(name, results / report.FILE, command, quiet=True))
    return steps


def _filled(line: str, values: dict[str, str]) -> list[str]:
    """Split a command line and fill its places in, spaces in values and all."""
    try:
        return [piece.format(**values) for piece in shlex.split(line)]
    except (KeyError, IndexError, ValueError) as error:
        known = ", ".join(f"{{{name}}}" for name in values)
        raise UserError(f"plan: {line!r} cannot be read ({error}): give {known}") from error


def _python(line: str, values: dict[str, str]) -> list[str]:
    return [sys.executable, *_filled(line, values)]


def _accelerate() -> str:
    return str(Path(sys.executable).with_name("accelerate"))


def _once(step: Step, stamps: Path) -> int:
    """Run a step unless it is done; return its exit code."""
    stamp = stamps / f"{step.name.replace(' ', '-')}.json"
    known = json.loads(stamp.read_text()) if stamp.exists() else {}
    same = known.get("command") == step.command
    if same and known["done"] and step.result.exists():
        note(f"{step.name}: done before")
        return 0
    if known and not same and step.own is not None:
        shutil.rmtree(step.own, ignore_errors=True)
    _stamp(stamp, step, done=False)
    note(f"{step.name}: {shlex.join(step.command)}")
    start = time.monotonic()
    code = _run(step)
    if code == 0:
        _stamp(stamp, step, done=True)
        note(f"{step.name}: done in {(time.monotonic() - start) / 60:.1f} min")
    return code


def _stamp(path: Path, step: Step, *, done: bool) -> None:
    write_text(path, json.dumps({"command": step.command, "done": done}))


def _run(step: Step) -> int:
    """Run a command in its own process group; signals are passed on and its end awaited.

    What the command prints goes to stderr: the table alone is this command's result.
    """
    interrupted: list[int] = []
    out = subprocess.DEVNULL if step.quiet else 2
    child = subprocess.Popen(step.command, stdout=out, start_new_session=True)

    def pass_on(number: int, _frame: object) -> None:
        interrupted.append(number)
        os.killpg(child.pid, number)

    before = {kind: signal.signal(kind, pass_on) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
        if interrupted:
            _wait_for_group(child.pid)
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    return 128 + interrupted[0] if interrupted else code


def _wait_for_group(group: int) -> None:
    """Wait until a launcher's own children have saved and ended."""
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)


def _show(path: Path) -> None:
    console = Screen()
    result = json.loads(path.read_text())
    console.show(report.table(result))
    if result.get("peers"):
        console.show(report.peers_table(result))
    note(f"all figures: {path}")


if __name__ == "__main__":
    run(cli)

"""Which test fails on a mutant: each runs in a fork of the process that collected the tests."""

import gc
import os
import pickle
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
from _pytest.runner import runtestprotocol

from tests.mutants.changes import Mutant

_LONGEST = 900  # seconds until what waits without end is stopped
_MEMORY = 4 * 2**30  # bytes that a fork may fill


@dataclass
class Reach:
    """What a test runs of the files, and how long it takes."""

    lines: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    seconds: float = 0.0
    failed: bool = False


class Judge:
    """A pytest plugin that runs mutants in place of the tests, once these are collected.

    Args:
        mutants: to be judged.
        told: called with every mutant and the test that failed; None: none did.
    """

    def __init__(
        self, mutants: Iterable[Mutant], told: Callable[[Mutant, str | None], None]
    ) -> None:
        """Wait for the tests."""
        self.mutants, self.told = list(mutants), told
        self._files = {str(Path(mutant.file).resolve()): mutant.file for mutant in self.mutants}
        self._killed: dict[tuple[str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Judge all mutants."""
        items = session.items
        gc.freeze()  # a fork that collects would copy every page
        start = time.monotonic()
        reaches = cast(list[Reach], _forked(lambda: [*map(self._reach, items)]))
        for item, reach in zip(items, reaches, strict=True):
            if reach.failed:
                print(f"left out, it fails without a change: {item.nodeid}", flush=True)
        spent = sum(reach.seconds for reach in reaches)
        print(f"{len(items)} tests, {spent:.0f} s, {time.monotonic() - start:.0f} s", flush=True)
        for mutant in self.mutants:
            self.told(mutant, self._judged(mutant, items, reaches))
        return True

    def _judged(self, mutant: Mutant, items: list[pytest.Item], reaches: list[Reach]) -> str | None:
        chosen = self._chosen(mutant, reaches)
        tests = [(items[place], 2 + 10 * reaches[place].seconds) for place in chosen]
        failing = _forked(lambda: _first_failing(mutant, tests))
        if not isinstance(failing, int):
            return cast(str | None, failing)
        if failing < 0:
            return "import"
        self._killed[mutant.file, mutant.function][chosen[failing]] += 1
        return items[chosen[failing]].nodeid

    def _reach(self, item: pytest.Item) -> Reach:
        """Run a test and note the lines of the mutated files that it runs."""
        reach, start = Reach(), time.process_time()

        def line(frame: FrameType, event: str, _: Any) -> Any:
            reach.lines.add((self._files[frame.f_code.co_filename], frame.f_lineno))
            return line

        def call(frame: FrameType, event: str, _: Any) -> Any:
            return line(frame, event, None) if frame.f_code.co_filename in self._files else None

        sys.settrace(call)
        reach.failed = _fails(item)
        sys.settrace(None)
        reach.seconds = time.process_time() - start
        if hasattr(getattr(item, "obj", None), "hypothesis"):
            reach.seconds *= 10  # what fails is run again and again, for a smaller example
        return reach

    def _chosen(self, mutant: Mutant, reaches: list[Reach]) -> list[int]:
        """Return the tests that run a mutant's lines, or else its function: killers, quick ones."""
        killed = self._killed[mutant.file, mutant.function]
        for first, last in (mutant.lines, mutant.body):
            lines = {(mutant.file, number) for number in range(first, last + 1)}
            found = [n for n, r in enumerate(reaches) if not r.failed and r.lines & lines]
            if found:
                return sorted(found, key=lambda n: (-killed[n], reaches[n].seconds))
        return []


def _fails(item: pytest.Item) -> bool:
    # without a next item every fixture is taken down, those of the session too
    return any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def _first_failing(mutant: Mutant, tests: Sequence[tuple[pytest.Item, float]]) -> int | None:
    """Return the place of the first test that fails, -1 if the file itself does.

    A test that takes more seconds of the processor than it is given ends the process: SIGPROF.
    """
    try:
        mutant.apply()
    except Exception:
        return -1
    for place, (item, seconds) in enumerate(tests):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if _fails(item):
            return place
    return None


def _forked(work: Callable[[], object]) -> object:
    """Return what a fork of this process works out, or how it ended."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            with os.fdopen(writer, "wb") as answer, Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
                resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, resource.RLIM_INFINITY))
                signal.alarm(_LONGEST)
                pickle.dump(work(), answer)
            os._exit(0)
        finally:  # whatever happens, a fork never goes on as its parent
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        found = answer.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if ended == 0:
        return pickle.loads(found)
    return "no answer" if ended > 0 else signal.Signals(-ended).name

"""Signals: SIGTERM and Ctrl-C end the training loop after the step that is running."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignals:
    """Remembers that the run was told to stop.

    Args:
        received: number of the signal, or None.
    """

    def __init__(self) -> None:
        """Start without one."""
        self.received: int | None = None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch signals while the block runs; a second one ends the process as it always did."""

        def stop(number: int, _frame: FrameType | None) -> None:
            self.received = number
            restore()

        def restore() -> None:
            for kind, handler in before.items():
                signal.signal(kind, handler)

        before = {kind: signal.signal(kind, stop) for kind in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            restore()

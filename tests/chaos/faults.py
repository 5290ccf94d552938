"""Faults: the k-th step that a command makes on the disk goes wrong."""

import builtins
import errno
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import safetensors.torch

from drafters import whole

KINDS = (
    "full disk",  # from here on nothing can be written
    "full disk, torn",  # and this file is half there
    "ctrl-c",
    "ctrl-c after",  # the step was made
    "kill",
    "kill, torn",
    "kill after",
)
KILLED = 137


@dataclass
class Faults:
    """Steps on files under a folder, one of which goes wrong.

    Args:
        root: the folder.
        kind: one of KINDS; "": nothing goes wrong.
        at: the step, from 1.
        steps: made so far.
    """

    root: Path
    kind: str = ""
    at: int = 0
    steps: int = 0

    def install(self) -> None:
        """Patch what writes, for the rest of this process."""
        for name in ("replace", "rename", "mkdir", "unlink", "rmdir"):
            setattr(os, name, self._watched(getattr(os, name)))
        whole._exchange = self._watched(whole._exchange)
        io.open = builtins.open = self._watched_open(io.open)
        torch_files: Any = safetensors.torch
        torch_files.serialize_file = self._watched(torch_files.serialize_file, place=1, writes=True)
        pq.write_table = self._watched(pq.write_table, place=1, writes=True)

    def _watched(
        self, real: Callable[..., Any], place: int = 0, writes: bool = False
    ) -> Callable[..., Any]:
        def step(*given: Any, **named: Any) -> Any:
            path = given[place] if len(given) > place else ""
            if not self._ours(path):
                return real(*given, **named)
            return self._step(lambda: real(*given, **named), Path(path) if writes else None)

        return step

    def _watched_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
            if not set(mode) & set("wax+") or not self._ours(file):
                return real(file, mode, *given, **named)
            return self._step(lambda: real(file, mode, *given, **named), Path(file))

        return step

    def _ours(self, path: Any) -> bool:
        return isinstance(path, str | Path) and str(path).startswith(str(self.root))

    def _step(self, make: Callable[[], Any], written: Path | None) -> Any:
        self.steps += 1
        full = self.kind.startswith("full disk")
        if not self.kind or self.steps < self.at:
            return make()
        if self.steps > self.at:
            if full and written is not None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(written))
            return make()
        if self.kind.endswith("torn") and written is not None and not written.exists():
            descriptor = os.open(written, os.O_CREAT | os.O_WRONLY)
            os.write(descriptor, b'{"half')
            os.close(descriptor)
        try:
            if self.kind.endswith("after"):
                make()
        finally:
            if self.kind.startswith("kill"):
                os._exit(KILLED)
        if full:
            if written is None:
                return make()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(written))
        raise KeyboardInterrupt

"""Command lines run inside the test's own process: seconds of imports saved on every call."""

import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from unittest.mock import patch

SCRIPTS = Path(__file__).parents[1] / "scripts"


@dataclass(frozen=True)
class Done:
    """How a command line ended."""

    returncode: int
    stdout: str
    stderr: str

    def shown(self) -> int:
        """Pass on what it said, and return its exit code."""
        for stream, text in ((sys.stdout, self.stdout), (sys.stderr, self.stderr)):
            stream.write(text)
            stream.flush()
        return self.returncode


def run_script(name: str, *options: str) -> Done:
    """Run scripts/NAME with these options as `python scripts/NAME` would.

    Every script also has one test that starts it as a process of its own.
    """
    out, err = StringIO(), StringIO()
    script = SCRIPTS / name
    code: object = 0
    with (
        patch.object(sys, "argv", [str(script), *options]),
        patch.object(sys, "path", [str(SCRIPTS), *sys.path]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int), code
    return Done(code, out.getvalue(), err.getvalue())

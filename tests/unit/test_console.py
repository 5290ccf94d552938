import importlib.util
import sys
import warnings
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.table import Table

from drafters.errors import UserError
from training.commandline import Screen

SOURCE = Path(__file__).parents[2] / "scripts" / "console.py"
spec = importlib.util.spec_from_file_location("console", SOURCE)
console = importlib.util.module_from_spec(spec)
spec.loader.exec_module(console)


def ending(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    cli = console.app("A command line.")

    @cli.command()
    def main(count: int = 1, how: str = "well") -> None:
        if how == "badly":
            raise UserError("how = 'badly' is not allowed;\n give 'well'")
        if how == "interrupted":
            raise KeyboardInterrupt
        if how == "long":
            Path("x" * 5000).stat()
        if how == "steered":
            raise UserError("no folder \x1b[2J\x9b1m[/red]:boom:")
        if how == "exit":
            raise typer.Exit(3)
        if how == "warned":
            said = warnings.formatwarning("outputs end\nearly", UserWarning, "file.py", 3)
            typer.echo(said, err=True, nl=False)
            raise typer.Exit(0)
        if how == "defect":
            raise ValueError("a defect")
        typer.echo(count)

    monkeypatch.setattr(sys, "argv", ["main.py", *options])
    with pytest.raises(SystemExit) as caught:
        console.run(cli)
    return caught.value.code


def test_done(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(monkeypatch, "--count", "7") == 0
    assert capsys.readouterr() == ("7\n", "")


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        (["--how", "badly"], 2, "error: how = 'badly' is not allowed; give 'well'\n"),
        (["--how", "interrupted"], 130, "interrupted; what was saved stays\n"),
        (["--how", "exit"], 3, ""),
        (["--how", "long"], 2, f"error: {'x' * 5000}: a name is too long: give another path\n"),
        # what would clear a terminal, markup that closes nothing, and what is no emoji
        (["--how", "steered"], 2, r"error: no folder \x1b[2J\x9b1m[/red]:boom:" + "\n"),
        (["--how", "warned"], 0, "warning: outputs end early\n"),
        (["--cuont", "7"], 2, "error: No such option: --cuont"),
        (["--count", "x"], 2, "error: Invalid value for '--count'"),
        (["--count"], 2, "error: Option '--count' requires an argument (see --help)\n"),
    ],
)
def test_endings(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: list[str],
    code: int,
    line: str,
) -> None:
    assert ending(monkeypatch, *options) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == (1 if line else 0)


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a defect"):
        ending(monkeypatch, "--how", "defect")


def test_foreign_distributions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert console.foreign_distributions() == []
    info = tmp_path / "inference-0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: inference\nVersion: 0.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (line,) = console.foreign_distributions()
    assert line.startswith("the distribution 'inference' 0.9 from PyPI is another project")
    assert "pip uninstall inference" in line


def test_no_name_steers_a_screen() -> None:
    """Categories and names of drafters stand in tables; an end of markup gave a traceback."""
    said = StringIO()
    table = Table("a\x1b]0;x\x07", title="[/bold]")
    table.add_row("[/red] :boom: \x1b[2Jx\tü")
    Screen(file=said, width=80).print(table, "[bold]plain")
    assert "\x1b" not in said.getvalue()
    for text in (r"a\x1b]0;x\x07", "[/bold]", r"[/red] :boom: \x1b[2Jx", "ü", "[bold]plain"):
        assert text in said.getvalue()


def test_no_bars_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with console.progress() as bars:
        task = bars.add_task("work", total=2)
        bars.advance(task)
    assert capfd.readouterr() == ("", "")


def test_tables_in_a_pipe_are_as_wide_as_their_figures() -> None:
    wide, prose = Table(), Table()
    for column in range(30):
        wide.add_column(f"figure {column}", no_wrap=True)
    prose.add_column("said")
    prose.add_row("word " * 100)
    said = StringIO()
    Screen(file=said).show(wide, prose)
    assert "figure 29" in said.getvalue()
    assert "\u2026" not in said.getvalue()
    assert len(said.getvalue().splitlines()[-2]) <= 120  # prose wraps

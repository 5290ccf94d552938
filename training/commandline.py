"""What every command line here shares: how its help looks, how it ends, where it writes.

scripts/console.py and training/run.py build on it. Results go to stdout; notes, errors and bars go
to stderr. NO_COLOR, and a stream that is no terminal, get plain text without bars.
"""

import errno
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from drafters.errors import UserError
from drafters.untrusted import LARGEST, is_too_large

# The base of all usage errors: typer carries a click of its own from 0.29 on, imports it before.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]
_PLAIN_WIDTH = "104"  # of help without a terminal: its examples fit
MARKED = "{{+{}+}}"  # what colours would mark, as git diff --word-diff does
_TABLE_WIDTH, _LONGEST = 120, 1000  # of tables without a terminal
# An option is in the same group of every command's help, and groups come in this order.
_GROUPS = {
    "What": (
        "target drafter prompts prompt system chat limit data openings texts chats tokens turns "
        "config plan family source wheel to benchmark folder peer _plugin template_options "
        "template_option endpoint model key_from features size lengths vary vocabularies quick "
        "bench fresh verify"
    ),
    "Decoding": (
        "max_new_tokens temperature temperatures top_k top_p min_p repetition_penalty "
        "presence_penalty frequency_penalty stop seed user_temperature user_top_p user_min_p "
        "user_tokens gamma nodes ranks depth widths tries overlap alpha max_looped plain"
    ),
    "Machine": (
        "dtype engine root device weights rows repeats warmup threads contexts samples minutes wait"
    ),
    "Output": (
        "out as_json json color dry_run list _ top show positions table public page allow_loss "
        "tolerance fail_on_regression shard"
    ),
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names.split()}
_OTHERS = "More"

if os.environ.get("NO_COLOR"):
    # rich and typer drop colours by themselves, bold and bars on a dumb terminal only
    os.environ["TERM"] = "dumb"
if not sys.stdout.isatty():
    # typer reads it when it first shows help
    os.environ.setdefault("TERMINAL_WIDTH", _PLAIN_WIDTH)
if not sys.stderr.isatty():
    # tqdm reads it on import: no bars of other libraries in logs either
    os.environ.setdefault("TQDM_DISABLE", "1")

_SPELT = {
    code: repr(chr(code))[1:-1]
    for code in (*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000))
    if chr(code) not in "\n\t"
}


def spelt(text: str) -> str:
    r"""Return a text as a terminal may print it: what would steer the terminal, as its escape.

    >>> spelt("a\x1b[2J\tb")
    'a\\x1b[2J\tb'
    """
    return text.translate(_SPELT)


class Screen(Console):
    """A console that no text steers: names, prompts and chats are somebody else's.

    Neither rich's markup nor control characters mean anything in them.
    """

    def __init__(self, **options: Any) -> None:
        """Take what rich's console takes."""
        super().__init__(markup=False, emoji=False, **options)

    def show(self, *tables: Table) -> None:
        """Print tables; where this is no terminal, so wide that no figure is cut."""
        for table in tables:
            if not self.is_terminal:
                whole = all(column.no_wrap for column in table.columns)
                wide = self.options.update(max_width=_LONGEST)
                needed = self.measure(table, options=wide).maximum if whole else 0
                self.width = max(_TABLE_WIDTH, needed)
            self.print(table)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text with a terminal's orders spelt out."""
        return super().render_str(spelt(text), **options)


stderr = Screen(stderr=True, highlight=False, soft_wrap=True)


def empty(text: str) -> typer.Typer:
    """Return a command line without commands; `text` is its help (see `dressed`)."""
    return typer.Typer(
        help=text, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
    )


def dressed(cli: typer.Typer) -> Any:
    """Return the click command with the app's help and its options in groups.

    The help is a script's docstring: a sentence, indented examples, prose. Under the console
    command `drafters` the examples are what is typed there.
    """
    command = typer.main.get_command(cli)
    text = _typed(str(cli.info.help))
    command.help = escape(re.sub(r"\n\n(?=    )", "\n\nExamples:\n", text, count=1))
    inner = list(getattr(command, "commands", {}).values())
    for one in inner:
        one.help = escape(_typed(one.help or ""))
    # click declares neither attribute on what all parameters share
    params: list[Any] = [param for one in (command, *inner) for param in one.params]
    for param in params:
        if isinstance(text := getattr(param, "help", None), str):
            param.help = escape(text)
        param.callback = _bounded(param.callback)
        if type(param).__name__ == "TyperOption" and param.rich_help_panel is None:
            param.rich_help_panel = _GROUP_OF.get(param.name, _OTHERS)
    for one in (command, *inner):
        one.params.sort(key=_place)
        about_help: Any = one.get_help_option(typer.Context(one))
        if about_help is not None:
            about_help.rich_help_panel = _OTHERS
    return command


def _place(param: Any) -> float:
    """Return where a parameter's group stands: arguments first, a command's own behind "What"."""
    group = getattr(param, "rich_help_panel", None)
    order = [*_GROUPS, _OTHERS]
    return order.index(group) if group in order else -1 if group is None else 0.5


def _bounded(inner: Any) -> Any:
    """Refuse what is no number, or larger than JSON holds exactly."""

    def checked(context: Any, param: Any, value: Any) -> Any:
        for one in value if isinstance(value, list | tuple) else [value]:
            if is_too_large(one):
                said = f"{one} is not a number up to {LARGEST}"
                raise typer.BadParameter(said, ctx=context, param=param)
        return value if inner is None else inner(context, param, value)

    return checked


def _typed(text: str) -> str:
    if not Path(sys.argv[0]).name.startswith("drafters "):
        return text
    text = re.sub(r"python scripts/fetch_target\.py", "drafters fetch-target", text)
    text = re.sub(r"python scripts/(\w+)\.py", lambda m: f"drafters {kebab(m[1])}", text)
    return re.sub(
        r"accelerate launch training/train_(\w+)\.py", lambda m: f"drafters train {m[1]}", text
    )


def kebab(name: str) -> str:
    """Return a file's stem as it is typed on a command line."""
    return name.replace("_", "-")


def ended(command: Any) -> int:
    """Run a command; return 0 or its own code, 2 after the user's mistake, 130 if interrupted."""
    before, warnings.formatwarning = warnings.formatwarning, _warning
    try:
        code = command(prog_name=Path(sys.argv[0]).name, standalone_mode=False)
    except UserError as error:
        return _fail(str(error))
    except _UsageError as error:
        return _fail(f"{_message(error)} (see --help)")
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return _fail(f"{error.filename}: a name is too long: give another path")
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    finally:
        warnings.formatwarning = before
    if code == 130:
        note("interrupted; what was saved stays")
    return code if isinstance(code, int) else 0


def note(text: str) -> None:
    """Write one line to stderr, of several processes from the first."""
    if os.environ.get("RANK", "0") == "0":
        stderr.print(text)


def _warning(message: Warning | str, *_: object) -> str:
    # Python's own form adds the place in our code and its source: of no use to a user
    return f"warning: {' '.join(str(message).split())}\n"


def _message(error: Exception) -> str:
    formatted = getattr(error, "format_message", None)
    return (formatted() if formatted else str(error)).rstrip(".")


def _fail(text: str) -> int:
    # Bare text to a pipe, so that the line can be matched; red for a person.
    if os.environ.get("RANK", "0") == "0":
        stderr.print(f"error: {' '.join(text.split())}", style="red")
    return 2

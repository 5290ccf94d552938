"""Ranges: what a setting may be, refused in one line before any model is loaded."""

from drafters.errors import UserError

_MOST_THREADS = 1024


def check_threads(name: str, value: int) -> None:
    """Refuse a number of threads that no machine starts: torch crashes on a million.

    Raises:
        UserError: says which are allowed.
    """
    if not 1 <= value <= _MOST_THREADS:
        raise UserError(f"{name} is {value}: give 1 to {_MOST_THREADS}")


def at_least(least: int, name: str, value: int) -> None:
    """Refuse less than `least`.

    Raises:
        UserError: says what is allowed.
    """
    if value < least:
        raise UserError(f"{name} is {value}: give {least} or more")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse what is not among the allowed words.

    Raises:
        UserError: names them.
    """
    if value not in allowed:
        raise UserError(f"{name} is {value!r}: give {', '.join(allowed)}")

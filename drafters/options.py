"""Options of a drafter family: plain values checked against a dataclass."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from drafters.errors import UserError
from drafters.settings import fill

Schema = TypeVar("Schema")


def no_options(name: str, options: Mapping[str, object]) -> None:
    """Refuse every option of a family that has none.

    Raises:
        UserError: if one was given.
    """
    if options:
        raise UserError(f"drafter {name} has no options: leave out {', '.join(options)}")


def checked(name: str, options: Mapping[str, object], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the options if each is known and of its kind.

    Args:
        name: of the family, for messages.
        options: what was given.
        kinds: allowed names and their types; an int serves where a float is asked for.

    Raises:
        UserError: names the option, what was given and what is allowed.
    """
    result: dict[str, Any] = {}
    for option, value in options.items():
        if option not in kinds:
            near = get_close_matches(option, kinds, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(
                f"drafter {name} has no option {option!r}{hint}: give {', '.join(sorted(kinds))}"
            )
        kind = kinds[option]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UserError(f"drafter {name}: {option} is {value!r}: give {kind.__name__}")
        result[option] = value
    return result


def fill_options(name: str, schema: type[Schema], options: Mapping[str, object]) -> Schema:
    """Fill a family's dataclass of options.

    Args:
        name: of the family, for messages.
        schema: the dataclass; its own checks run too.
        options: what was given.

    Raises:
        UserError: names the option, what was given and what is allowed.
    """
    try:
        return fill(schema, options)
    except UserError as error:
        raise UserError(f"drafter {name}: {error}") from None

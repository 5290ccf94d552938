"""Options of a drafter family: plain values checked against a dataclass."""

from collections.abc import Mapping
from difflib import get_close_matches


from drafters.errors import UserError


def no_options(name: str, options: Mapping[str, object]) -> None:
    """Refuse every option of a family that has none.

    Raises:
        UserError: if one was given.
    """
    if options:
        raise UserError(f"drafter {name} has no options: leave out {', '.join(options)}")


def checked(
    name: str, options: Mapping[str, object], kinds: Mapping[str, type]
) -> dict[str, object]:
    """Return the options if each is known and of its kind.

    Args:
        name: of the family, for messages.
        options: what was given.
        kinds: allowed names and their types; an int serves where a float is asked for.

    Raises:
        UserError: names the option, what was given and what is allowed.
    """
    result: dict[str, object] = {}
    for option, value in options.items():
        if option not in kinds:
            near = get_close_matches(option, kinds, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(
                f"drafter {name} has no option {option!r}{hint}: give {', '.join(sorted(kinds))}"
            )
        kind = kinds[option]
        if kind is float and type(value) is int:
            value = float(value)  # noqa: PLW2901 - a whole number is a fine float
        if type(value) is not kind:
            raise UserError(f"drafter {name}: {option} is {value!r}: give {kind.__name__}")
        result[option] = value
    return result

"""Spec: a drafter and how it drafts, as command lines name them.

`D`, or `D:growth=chain,gamma=4`, `D:growth=static,branching=3.2.1`, `D:growth=static,tree=FILE`,
`D:growth=dynamic,nodes=8`, `D:growth=best_first,nodes=16`, `D:growth=cost_aware`, `draft=sampled`,
`verify=traversal`. D is a drafter's folder, or the name of one without weights, whose own options
stand beside the others, or of one whose weights the target ships. `A+B:growth=dynamic,nodes=8`
drafts with both in one tree of that shape; `A:longest=5+B` gives a part an option of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from drafters.base import Drafter, NeuralDrafter
from drafters.checkpoint import load_drafter, parts_of
from drafters.errors import UserError
from drafters.growth import POLICIES, Growth, ShapeValue, build_growth
from drafters.growth.ranks import read_paths
from drafters.registry import build_drafter, joined, method
from drafters.target import Target
from inference.modes import resolve


@dataclass(frozen=True)
class Spec:
    """What a command line says about one drafter.

    Args:
        text: as it was given.
        drafter: a folder, or the name of a drafter without weights; several joined by +, all but
            the last with their options.
        growth: the shape of its trees.
        growth_name: what the shape is called.
        growth_options: what was given for it.
        verify: name of the verifier.
        options: of a drafter without weights, the last one of several.
    """

    text: str
    drafter: str
    growth: Growth
    growth_name: str = "chain"
    growth_options: Mapping[str, object] = field(default_factory=dict)
    verify: str = "lossless"
    options: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """Read a spec; a shape that is not named is a chain.

        >>> Spec.parse("ngram:gamma=5,longest=4").growth
        Chain(gamma=5, draft='argmax')

        Raises:
            UserError: on a part that is not key=value, a growth or verifier that does not exist, a
                verifier that may not judge what the growth drafts.
        """
        *others, last = parts_of(text)
        name, given = _split(text, last)
        for other in others:
            _check_part(text, other)
        drafter = "+".join([*others, name])
        growth_name, verify = given.pop("growth", "chain"), given.pop("verify", None)
        shape: dict[str, ShapeValue] = {}
        for key in [key for key in given if key in _shape_options()]:
            value = given.pop(key)
            shape[key] = _shape_value(text, key, value)
        options = {key: _plain(value) for key, value in given.items()}
        growth = build_growth(growth_name, shape)
        verify = resolve(growth, verify)
        return cls(text, drafter, growth, growth_name, shape, verify, options)

    def load(self, target: Target) -> Drafter:
        """Load the drafter for this target.

        Raises:
            UserError: if there is none, it was made for another target, or an option is unknown.
        """
        *others, last = parts_of(self.drafter)
        parts = [_load(other, *_split_plain(self.text, other), target) for other in others]
        return joined([*parts, _load(self.text, last, self.options, target)])

    @property
    def folders(self) -> list[Path]:
        """Return the folders among its drafters."""
        names = [part.partition(":")[0] for part in parts_of(self.drafter)]
        return [Path(name) for name in names if Path(name).is_dir()]


def _load(text: str, name: str, options: Mapping[str, object], target: Target) -> Drafter:
    is_name = "/" not in name and not Path(name).is_dir()
    if options and is_name and not issubclass(method(name), NeuralDrafter):
        # never made without its options first: universal has none without its model
        try:
            return build_drafter(name, options, target.shape)
        except UserError as error:
            near = next(filter(None, map(_near, options)), None)
            raise UserError(f"{error}{f'; or is it {near}?' if near else ''}") from error
    drafter = load_drafter(name, target)
    if not options:
        return drafter
    first = next(iter(options))
    raise UserError(f"drafter {text!r} has no option {first!r}{_hint(first)}")


def _split(text: str, part: str) -> tuple[str, dict[str, str]]:
    """Return a part's name and what is given for it."""
    name, colon, rest = part.partition(":")
    if not name or (colon and not rest):
        raise UserError(f"drafter {text!r}: give D or D:key=value,key=value")
    return name, _pairs(text, rest) if rest else {}


def _split_plain(text: str, part: str) -> tuple[str, dict[str, object]]:
    name, given = _split(text, part)
    return name, {key: _plain(value) for key, value in given.items()}


def _check_part(text: str, part: str) -> None:
    shape = sorted({"growth", "verify", *_shape_options()} & set(_split(text, part)[1]))
    if shape:
        raise UserError(
            f"drafter {text!r}: {shape[0]} stands before the last +: give the shape of the whole "
            "tree behind the last drafter"
        )


def _shape_value(text: str, key: str, value: str) -> ShapeValue:
    if key == "tree":
        return read_paths(value)
    return _numbers(text, value) if key == "branching" else _plain(value)


def _shape_options() -> set[str]:
    return {name for policy in POLICIES.values() for name in policy.__dataclass_fields__}


def _pairs(text: str, rest: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in rest.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise UserError(f"drafter {text!r}: {part!r} is not key=value")
        if key in pairs:
            raise UserError(f"drafter {text!r}: {key} is given twice")
        pairs[key] = value
    return pairs


def _plain(value: str) -> int | str:
    try:
        return int(value)
    except ValueError:
        return value


def _numbers(text: str, value: str) -> tuple[int, ...]:
    parts = value.split(".")
    if not all(part.isdecimal() for part in parts):
        raise UserError(
            f"drafter {text!r}: branching is {value}: give children per depth, such as 3.2.1"
        )
    return tuple(int(part) for part in parts)


def _hint(option: str) -> str:
    near = _near(option)
    return f" (did you mean {near}?)" if near else f": give {', '.join(_known())}"


def _near(option: str) -> str | None:
    """Return the word of a shape, if any, that an option was probably meant to be."""
    return next(iter(get_close_matches(option, _known(), 1)), None)


def _known() -> list[str]:
    return sorted({"growth", "verify"} | _shape_options())

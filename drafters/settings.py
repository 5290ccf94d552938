"""Strict settings: a dataclass is the schema, YAML files and dotted overrides fill it.

OmegaConf does the work (types, merging, interpolation). This file adds, in one line, where a wrong
value came from, what is allowed there and the nearest known key. It knows no setting: every schema
lives beside its reader.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drafters.errors import UserError
from drafters.untrusted import LARGEST, is_too_large

T = TypeVar("T")
KeyPath = tuple[str, ...]

_SCALARS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
}


def load(schema: type[T], files: Sequence[Path] = (), overrides: Sequence[str] = ()) -> T:
    """Fill a schema from YAML files, then from overrides; later ones win.

    Args:
        schema: a dataclass; `omegaconf.MISSING` marks a field that must be given, `dict[str, Any]`
            a free-form section.
        files: YAML mappings; sections are merged, lists are replaced whole.
        overrides: `a.b=value`, the value in YAML.

    Returns:
        An instance of the schema, nested dataclasses and all.

    Raises:
        UserError: an unknown key, a wrong type, a missing value, or a file or override that cannot
            be read.
    """
    config: Any = OmegaConf.structured(schema)
    for file in files:
        for path, value in _leaves(_read(file)):
            try:
                config = _merged(config, schema, path, value)
            except UserError as error:
                raise UserError(f"{file}{_line(file, path)}: {error}") from None
    for override in overrides:
        for path, value in _leaves(_parse(override)):
            config = _merged(config, schema, path, value)
    return _instance(config)


def fill(schema: type[T], values: Mapping[str, Any]) -> T:
    """Fill a schema from plain values, as `load` does from files.

    Raises:
        UserError: an unknown key, a wrong type or a missing value.
    """
    config: Any = OmegaConf.structured(schema)
    for path, value in _leaves(values):
        config = _merged(config, schema, path, value)
    return _instance(config)


def to_yaml(settings: object) -> str:
    """Write settings so that `load` with the same schema gives them back."""
    return OmegaConf.to_yaml(OmegaConf.structured(settings))


def configs_dir() -> Path:
    """Return the folder of the project's own configs, in the wheel or in the checkout."""
    packaged = Path(__file__).parent / "_configs"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "configs"


def own(path: str | Path) -> Path:
    """Return a path, or the project's own `configs/...` of that name where nothing lies there."""
    given = Path(path)
    if given.exists() or given.parts[:1] != ("configs",):
        return given
    shipped = configs_dir().joinpath(*given.parts[1:])
    return shipped if shipped.exists() else given


def find_config(name: str | Path) -> Path:
    """Return a config file: a path that exists, else the project's own one of that name.

    Raises:
        UserError: neither exists.
    """
    given = Path(name)
    if given.is_file():
        return given
    inside = given.parts[1:] if given.parts[:1] == ("configs",) else given.parts
    shipped = configs_dir().joinpath(*inside)
    if shipped.is_file() and not given.is_absolute():
        return shipped
    home, folder = configs_dir().resolve(), shipped.parent.resolve()
    if not folder.is_dir() or not folder.is_relative_to(home):
        folder = home
    known = ", ".join(str(p.relative_to(home)) for p in sorted(folder.rglob("*.yaml")))
    raise UserError(f"no config file {given}; give a path that exists or one of: {known or 'none'}")


def _read(file: Path) -> Mapping[str, Any]:
    try:
        config = OmegaConf.load(file)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{file}{where}: not valid YAML: {error.problem}") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise UserError(f"{file}: nested too deeply to be settings") from None
    except (OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{file}: not settings: {_first_line(error)}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{file}: not valid YAML: {_first_line(error)}") from None
    return _mapping(config, f"{file}")


def _parse(override: str) -> Mapping[str, Any]:
    key, equals, _ = override.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise UserError(f"{override!r} is not a setting; write key=value or section.key=value")
    try:
        override.encode()
        return _mapping(OmegaConf.from_dotlist([override]), override)
    except UnicodeEncodeError:
        raise UserError(f"{override!r}: holds bytes that are no UTF-8") from None
    except yaml.YAMLError as error:
        raise UserError(
            f"{override!r}: the value is not valid YAML: {_first_line(error)}"
        ) from None
    except OmegaConfBaseException as error:
        raise UserError(f"{override!r}: {_first_line(error)}") from None


def _mapping(config: Any, source: str) -> Mapping[str, Any]:
    plain = OmegaConf.to_container(config)
    if not isinstance(plain, dict):
        raise UserError(f"{source}: holds {type(plain).__name__} where a mapping of keys is needed")
    return cast("dict[str, Any]", plain)


def _leaves(tree: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    # One leaf at a time, since OmegaConf does not name the key of every failed merge.
    for key, value in tree.items():
        path = (*above, str(key))
        if isinstance(value, dict) and value:
            yield from _leaves(cast("dict[str, Any]", value), path)
        else:
            yield path, value


def _merged(config: Any, schema: type, path: KeyPath, value: Any) -> Any:
    nested = value
    for key in reversed(path):
        nested = {key: nested}
    try:
        return OmegaConf.merge(config, nested)
    except (OmegaConfBaseException, TypeError) as error:
        raise UserError(_complaint(schema, path, value)) from error


def _complaint(schema: type, path: KeyPath, value: Any) -> str:
    hint: Any = schema
    for depth, key in enumerate(path):
        if not _is_section(hint):
            return f"{'.'.join(path[:depth])} has no key {key!r}; give it {_describe(hint)}"
        child = _child(hint, key)
        if child is None:
            return f"unknown key {'.'.join(path)!r}; {_nearest(schema, path)}"
        hint = child
    return f"{'.'.join(path)} = {value!r} is not allowed; give {_describe(hint)}"


def _nearest(schema: type, path: KeyPath) -> str:
    known = list(_known(schema))
    name = ".".join(path)
    by_last = {key.rpartition(".")[2]: key for key in reversed(known)}
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    close += [by_last[k] for k in difflib.get_close_matches(path[-1], by_last, n=1, cutoff=0.7)]
    return f"the nearest known key is {close[0]!r}" if close else f"known keys: {', '.join(known)}"


def _known(hint: Any, above: str = "") -> Iterator[str]:
    for name, child in _hints(_bare(hint)).items():
        if dataclasses.is_dataclass(_bare(child)):
            yield from _known(child, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def _bare(hint: Any) -> Any:
    # `Section | None` is the section for whoever looks for keys.
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return options[0] if len(options) == 1 else Any
    return hint


def _hints(hint: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(hint):
        return {}
    hints = typing.get_type_hints(hint)
    return {field.name: hints[field.name] for field in dataclasses.fields(hint)}


def _is_section(hint: Any) -> bool:
    bare = _bare(hint)
    return dataclasses.is_dataclass(bare) or bare is Any or typing.get_origin(bare) is dict


def _child(hint: Any, key: str) -> Any:
    bare = _bare(hint)
    if dataclasses.is_dataclass(bare):
        return _hints(bare).get(key)
    return Any if bare is Any else typing.get_args(bare)[1]


def _describe(hint: Any) -> str:
    bare = _bare(hint)
    return _describe_bare(bare) + (" or null" if bare is not hint else "")


def _describe_bare(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (list, tuple):
        return f"a list [...], each {_describe(args[0])}"
    if dataclasses.is_dataclass(hint):
        return "a section with the keys " + ", ".join(_hints(hint))
    if isinstance(hint, enum.EnumType):
        return "one of " + ", ".join(hint.__members__)
    return _SCALARS.get(hint, "a section of keys" if origin is dict else "another value")


def _line(file: Path, path: KeyPath) -> str:
    node: Any = cast("Any", yaml).compose(file.read_text(encoding="utf-8"))
    line = 0
    for key in path:
        pairs: Any = node.value if isinstance(node, yaml.MappingNode) else ()
        found = next((pair for pair in pairs if str(pair[0].value) == key), None)
        if found is None:  # the key came through a YAML merge (`<<`)
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return f" line {line}" if line else ""


def _instance(config: Any) -> Any:
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if not missing:
            _check_numbers(OmegaConf.to_container(config))
            return OmegaConf.to_object(config)
    except UserError:
        raise
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {_first_line(error)}") from error
    except ValueError as error:  # a schema's own __post_init__
        raise UserError(_first_line(error)) from error
    names = ", ".join(missing)
    raise UserError(f"no value for {names}; give it in the YAML file or as {missing[0]}=VALUE")


def _check_numbers(values: Any) -> None:
    """Refuse numbers that are none (NaN passes every comparison), or that JSON cannot hold."""
    for path, value in _leaves(values):
        for one in cast("list[Any]", value) if isinstance(value, list) else [value]:
            if is_too_large(one):
                raise UserError(f"{'.'.join(path)} is {one}: give a number up to {LARGEST}")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]

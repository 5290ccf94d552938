"""The registry of drafter families: name -> class."""

import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module, util
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from drafters.base import Drafter, NeuralDrafter
from drafters.errors import UserError
from drafters.shape import TargetShape

_METHODS: dict[str, Any] = {}
_OTHER_NAMES: dict[str, str] = {}
_CAUSAL_LMS: list[Any] = []
_JOINTS: list[Any] = []


class Family(Protocol):
    """A drafter class as the registry sees it."""

    name: ClassVar[str]

    @classmethod
    def build(cls, options: Mapping[str, object], shape: TargetShape) -> Any:
        """Make an untrained drafter."""
        ...


Method = TypeVar("Method", bound=type[Family])


def register(method: Method) -> Method:
    """Register a drafter class under its `name`."""
    _METHODS[method.name] = method
    return method


def also_called(name: str) -> Callable[[Method], Method]:
    """Register another name of a family, such as that of the paper it is in."""

    def add(family: Method) -> Method:
        _OTHER_NAMES[name] = family.name
        return family

    return add


def reads_causal_lms(family: Method) -> Method:
    """Name the family that serves a plain causal LM's folder through `load(folder, target)`."""
    _CAUSAL_LMS.append(family)
    return family


def causal_lm_family() -> type[Any]:
    """Return the family that drafts with plain causal LMs."""
    methods()
    return _CAUSAL_LMS[0]


def joins_drafters(family: Method) -> Method:
    """Name the family that makes one drafter of several."""
    _JOINTS.append(family)
    return family


def joined(drafters: Sequence[Drafter]) -> Drafter:
    """Return one drafter of several; a single one as it is."""
    methods()
    return drafters[0] if len(drafters) == 1 else _JOINTS[0](drafters)


def methods() -> dict[str, type[Any]]:
    """Return every registered family by name."""
    import_module("drafters.methods")  # families register on import, and import us
    return dict(_METHODS)


def method(name: str) -> type[Any]:
    """Return one family, by its name or another one of it.

    Raises:
        UserError: if there is none of that name; names the nearest.
    """
    known = methods()
    name = _OTHER_NAMES.get(name, name)
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"no drafter is called {name!r}{hint}: give {', '.join(sorted(known))}")
    return known[name]


def load_plugin(plugin: str) -> None:
    """Import somebody's module of drafter families; it runs, so name only what you trust.

    Args:
        plugin: a Python file, or the name of an importable module; its classes are decorated with
            `register`. A plugin that was loaded before is left alone.

    Raises:
        UserError: it cannot be imported, registers nothing, or takes the name of another family.
    """
    before = methods()
    if (loaded := _plugin_name(plugin)) in sys.modules:
        return
    try:
        _import(plugin, loaded)
    except Exception as error:  # whatever somebody's module may raise
        sys.modules.pop(loaded, None)
        raise UserError(
            f"plugin {plugin} cannot be imported ({type(error).__name__}: {error}): give a Python "
            "file or an importable module that registers a drafter"
        ) from error
    taken = [name for name, family in before.items() if _METHODS[name] is not family]
    _METHODS.update(before)
    if taken:
        raise UserError(f"plugin {plugin} takes the name {taken[0]!r}, which another drafter has")
    if _METHODS.keys() == before.keys():
        raise UserError(
            f"plugin {plugin} registers no drafter: decorate its class with "
            "drafters.registry.register"
        )


def _plugin_name(plugin: str) -> str:
    return f"drafters_plugin_{Path(plugin).stem}" if plugin.endswith(".py") else plugin


def _import(plugin: str, name: str) -> None:
    if name == plugin:
        import_module(name)
        return
    spec = util.spec_from_file_location(name, plugin)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)


def build_drafter(
    name: str, options: Mapping[str, object], shape: TargetShape
) -> Drafter | NeuralDrafter:
    """Make an untrained drafter of a family.

    Raises:
        UserError: on an unknown family or option.
    """
    return method(name).build(options, shape)

"""What can be changed in a file, and putting a change into the functions that are loaded."""

import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.file_mutation import Mutation, MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

# mutmut leaves all decorated functions out: it replaces them by name, here their code is replaced
_DECORATORS = {"cached_property", "classmethod", "lru_cache", "property", "staticmethod"}


class _Visitor(MutationVisitor):
    METADATA_DEPENDENCIES = MutationVisitor.METADATA_DEPENDENCIES

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and node.decorators:
            return not all(_name(decorator) in _DECORATORS for decorator in node.decorators)
        return super()._skip_node_and_children(node)


def _name(decorator: cst.Decorator) -> str:
    called = decorator.decorator
    called = called.func if isinstance(called, cst.Call) else called
    return called.value if isinstance(called, cst.Name) else ""


@dataclass(frozen=True)
class Mutant:
    """One changed expression.

    Args:
        file: that it is in, from the repository's root.
        function: that it is in, with its class.
        number: among those of the function, from 1.
        lines: of the expression, first and last.
        body: first and last line of the function.
        change: in mutmut's form, with the file as it was parsed.
    """

    file: str
    function: str
    number: int
    lines: tuple[int, int]
    body: tuple[int, int]
    change: Mutation = field(repr=False)
    parsed: cst.Module = field(repr=False)

    def __str__(self) -> str:
        nodes = (self.change.original_node, self.change.mutated_node)
        before, after = (" ".join(self.parsed.code_for_node(node).split()) for node in nodes)
        return f"{self.file}:{self.lines[0]} {self.function} [{self.number}]: {before}  ->  {after}"

    @property
    def module(self) -> str:
        """Return the name of the file's module."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def apply(self) -> None:
        """Give the function of this process the changed code."""
        space, names = vars(importlib.import_module(self.module)), self.function.split(".")
        change, outer = self.change, self.change.contained_by_top_level_function
        new = deep_replace(outer, change.original_node, change.mutated_node)
        bare = cast(cst.FunctionDef, new).with_changes(decorators=(), leading_lines=())
        made: dict[str, Any] = {}
        exec(compile(self.parsed.code_for_node(bare), self.file, "exec"), space, made)
        changed = cast(FunctionType, made[names[-1]])
        own = _plain(space, names)
        own.__code__, own.__defaults__ = changed.__code__, changed.__defaults__
        own.__kwdefaults__ = changed.__kwdefaults__


def _plain(space: dict[str, Any], names: list[str]) -> FunctionType:
    """Return the plain function behind a name; what it has kept is thrown away."""
    found = space[names[0]]
    for name in names[1:]:
        found = vars(found)[name]
    if hasattr(found, "cache_clear"):
        found.cache_clear()
    for inner in ("__wrapped__", "__func__", "fget", "func"):
        found = getattr(found, inner, None) or found
    return cast(FunctionType, found)


def mutants_of(file: str) -> Iterator[Mutant]:
    """Yield all mutants of a file, function by function."""
    wrapper = MetadataWrapper(cst.parse_module(Path(file).read_text(encoding="utf-8")))
    none = IgnoredCode(no_mutate_lines=set(), ignore_node_lines=set(), ignore_pattern_lines=set())
    visitor = _Visitor(mutation_operators, none)
    wrapper.visit(visitor)
    places, counts = wrapper.resolve(PositionProvider), Counter[str]()
    for change in visitor.mutations:
        outer = change.contained_by_top_level_function
        if isinstance(outer, cst.FunctionDef):
            name = _qualified(wrapper.module, outer)
            counts[name] += 1
            lines, body = (
                (place.start.line, place.end.line)
                for place in (places[change.original_node], places[outer])
            )
            yield Mutant(file, name, counts[name], lines, body, change, wrapper.module)


def _qualified(module: cst.Module, outer: cst.FunctionDef) -> str:
    for statement in module.body:
        if isinstance(statement, cst.ClassDef) and outer in statement.body.body:
            return f"{statement.name.value}.{outer.name.value}"
    return outer.name.value

"""Engines: which forward serves a target, and why one cannot.

`fast` is the lean forward on packed weights, `static` the same at fixed shapes, `reference` the
model's own. What is served is compared with the model's plain forward first (selftest.py).
"""

import warnings
from collections.abc import Callable
from typing import Any

from drafters.errors import UserError
from drafters.lean import LeanModel
from drafters.reference import ReferenceModel
from drafters.static import StaticModel

Forward = ReferenceModel | LeanModel
Check = Callable[[Forward], str | None]
"""Serves with a forward and says how it differs from the model's plain one, None if it does not."""

ENGINES = ("fast", "reference", "static")


def check_engine(engine: str | None) -> None:
    """Refuse the name of no engine.

    Raises:
        UserError: names those that there are.
    """
    if engine is not None and engine not in ENGINES:
        raise UserError(f"engine is {engine!r}: give {', '.join(ENGINES)}")


def choose_forward(
    model: Any, name: str, engine: str | None, own: ReferenceModel, difference: Check
) -> tuple[str, Forward]:
    """Return the engine's name and its forward.

    Args:
        model: the Hugging Face base model (without its head).
        name: of the target.
        engine: one of ENGINES; None: fast where the model allows, else reference with a warning.
        own: the model's own forward.
        difference: the self-test.

    Raises:
        UserError: if the engine asked for cannot be had, or the model's own is served wrongly.
    """
    if engine != "reference":
        wanted = engine or "fast"
        found = _lean(StaticModel if wanted == "static" else LeanModel, model, difference)
        if isinstance(found, LeanModel):
            return wanted, found
        if engine is not None:
            raise UserError(
                f"target {name} cannot run on the {engine} engine: {found}; give engine reference, "
                "or none to have it chosen"
            )
        warnings.warn(f"{name}: {found}; using the reference engine", stacklevel=3)
    try:
        found = difference(own)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise UserError(
            f"target {name} does not run over the engine's cache ({reason}): "
            "give a model whose layers share one number and size of key heads and take "
            "position_ids and a 4-D mask"
        ) from error
    if found is not None:
        raise UserError(
            f"target {name} would be served wrongly: {found}; the engine has no form "
            "for what this model does, give another"
        )
    return "reference", own


def _lean(kind: type[LeanModel], model: Any, difference: Check) -> LeanModel | str:
    """Return the lean forward, or why this model has none."""
    try:
        lean = kind(model)
    except NotImplementedError as found:
        return str(found)
    found = difference(lean)
    return lean if found is None else f"the lean forward fails the self-test ({found})"

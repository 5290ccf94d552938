"""Card: the README.md of a published drafter, written from what is known and nothing else."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from safetensors import safe_open

from drafters.adapter import ADAPTER, is_adapter
from drafters.base import NeuralDrafter
from drafters.checkpoint import parts_of
from drafters.errors import UserError
from drafters.growth.label import shape_label
from drafters.hub import is_hub_id
from drafters.paths import without_paths
from drafters.stored import WEIGHTS, StoredDrafter

MANIFEST = "data_manifest.json"
_RECIPE = (
    "drafter",
    "options",
    "loss",
    "optim",
    "adapter",
    "schedule",
    "features",
    "on_policy",
    "warm_start",
)
_PLAIN = ("seed", "precision", "target_dtype", "publish_dtype")
_MARKS = re.compile(r"[\\`*|\[\]]")  # of Markdown, wherever they stand
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Sources:
    """What a card is written from, beside the drafter itself.

    Args:
        recipe: the run's resolved settings; empty: those that the drafter stores.
        manifest: of the data, as its maker wrote it.
        benchmark: what scripts/benchmark.py wrote.
    """

    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    manifest: Mapping[str, Any] = field(default_factory=dict[str, Any])
    benchmark: Mapping[str, Any] = field(default_factory=dict[str, Any])


def card(stored: StoredDrafter, drafter: NeuralDrafter, sources: Sources, place: str) -> str:
    """Return the card.

    Args:
        stored: the folder that is published, with paths as they are to be shown.
        drafter: what is in it.
        sources: see there.
        place: where it will be loaded from.

    Raises:
        UserError: if the benchmark did not measure this drafter.
    """
    training, target = stored.training, stored.made_for
    layers = drafter.features.layers
    environment = Environment(
        loader=PackageLoader("drafters", ""),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"prose": _prose, "quoted": _quoted, "shell": shlex.quote}
    data: Mapping[str, Any] = training.get("data") or {}
    names = [target.name, target.base]
    return environment.get_template("card.md.jinja").render(
        family=stored.family,
        target=target,
        base_model=next((name for name in names if is_hub_id(name)), None),
        layers=layers,
        hidden_states=[layer + 1 for layer in layers],
        last=drafter.features.last,
        draft_ids=None if drafter.ids is None else len(drafter.ids),
        parameters=f"{sum(p.numel() for p in drafter.parameters()):,}",
        dtype=_stored_dtype(stored.folder),
        data=data,
        chats=training.get("chats"),
        manifest=sources.manifest,
        manifest_file=MANIFEST,
        chat_template=training.get("chat_template"),
        recipe=_recipe(stored, sources.recipe),
        step=training.get("step"),
        metrics=training.get("metrics") or {},
        measured=_measured(stored.folder, sources.benchmark, place) if sources.benchmark else None,
        place=place,
        shipped=is_adapter(stored.folder / ADAPTER),
        decider=_decider(stored, place),
    )


def _prose(text: object) -> str:
    """Return what Markdown shows as this text, on one line: a name is somebody else's."""
    return _MARKS.sub(r"\\\g<0>", " ".join(str(text).split())).replace("<", "&lt;")


def _quoted(text: str) -> str:
    """Return a text as Python reads it."""
    return json.dumps(text, ensure_ascii=False)


def _decider(stored: StoredDrafter, place: str) -> str | None:
    """Return where the target is loaded from, as far as that is known."""
    if is_adapter(stored.folder / ADAPTER):
        return f"{'DIR' if is_hub_id(place) else place}/{ADAPTER}"
    target = stored.made_for
    names = [target.name] if target.adapter else [target.name, target.base]
    return next((name for name in names if is_hub_id(name)), None)


def _recipe(stored: StoredDrafter, recipe: Mapping[str, Any]) -> str:
    settings = {**stored.training, **recipe, "options": dict(stored.options)}
    settings["drafter"] = stored.family
    if not stored.made_for.adapter:
        settings.pop("adapter", None)
    kept = {name: settings[name] for name in (*_RECIPE, *_PLAIN) if settings.get(name)}
    plain = json.loads(json.dumps(kept))  # tuples as lists
    return yaml.safe_dump(plain, sort_keys=False).rstrip()


def _measured(folder: Path, benchmark: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return what the card says of a benchmark: this drafter's lines and the command."""
    lines = [one for one in benchmark["drafters"] if _same(one.get("checkpoint"), folder)]
    if not lines:
        others = sorted(
            {str(one.get("checkpoint") or one["name"]) for one in benchmark["drafters"]}
        )
        raise UserError(
            f"the benchmark measured {', '.join(others) or 'no drafter'}, not {folder}: give the "
            "benchmark.json of this one"
        )
    settings = benchmark["settings"]
    return {
        **settings,
        "machine": _machine(benchmark["machine"]),
        "table": [_line(one, settings["prompts"], folder) for one in lines],
        "command": _command(settings, [_named(one, folder, place) for one in lines]),
    }


def _same(checkpoint: str | None, folder: Path) -> bool:
    return checkpoint is not None and Path(checkpoint).resolve() == folder.resolve()


def _machine(machine: Mapping[str, Any]) -> str:
    parts = [f"{key} {value}" for key, value in machine.items() if isinstance(value, str | int)]
    return ", ".join(parts)


def _named(one: Mapping[str, Any], folder: Path, place: str) -> str:
    """Return a line's drafter as it is named where it is published, with others in its tree."""
    found: list[str] = []
    for part in parts_of(one["name"]):
        name, colon, rest = part.partition(":")
        own = f"{place}{colon}{without_paths(rest)}"
        found.append(own if _same(name, folder) else without_paths(part))
    return "+".join(found)


def _shape(one: Mapping[str, Any], folder: Path) -> str:
    """Return a line's shape, and who else drafted in its tree."""
    names = [part.partition(":")[0] for part in parts_of(one["name"])]
    others = [Path(name).name for name in names if not _same(name, folder)]
    shape = shape_label(one["growth"], one["shape"], one.get("nodes"))
    return f"{shape}, together with {', '.join(others)}" if others else shape


def _line(one: Mapping[str, Any], prompts: int, folder: Path) -> dict[str, str]:
    interval = one["speedup_interval"]
    between = f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else ""
    identical = one["identical"]
    return {
        "shape": _shape(one, folder),
        "verifier": one["verify_mode"],
        "tau": _number(one["tau"]),
        "distinct": _percent(one.get("distinct_4")),
        "looped": _percent(one.get("looped_share")),
        "alpha": _number(one["alpha"]),
        "speedup": _number(one["speedup"]) + between,
        "identical": "drawn" if identical is None else f"{identical} of {prompts}",
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _command(settings: Mapping[str, Any], drafters: Sequence[str]) -> str:
    """Return the command that measures the same again with the published drafter."""
    parts = ["python scripts/benchmark.py --target TARGET"]
    parts.append(f"--prompts {shlex.quote(Path(settings['prompts_file']).name)}")
    parts.append(f"--limit {settings['prompts']} --max-new-tokens {settings['max_new_tokens']}")
    parts.append(f"--temperature {settings['temperature']:g} --dtype {settings['dtype']}")
    parts.append(f"--rows {settings['rows']} --repeats {settings['repeats']}")
    parts += [f"--drafter {shlex.quote(drafter)}" for drafter in drafters]
    return " \\\n    ".join(parts)


def _stored_dtype(folder: Path) -> str:
    with safe_open(folder / WEIGHTS, "pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return " and ".join(sorted(_FLOATS[kind] for kind in kinds if kind in _FLOATS))

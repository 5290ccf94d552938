"""A run's target: beside the drafter, spread over devices, or held by an engine that makes states.

In the last case (features.engine) embedding, norm and head are here, its layers stay on the disk.
"""

from collections.abc import Sequence

import torch

from drafters.errors import UserError
from drafters.loading import load_config
from drafters.spread import layers_on_disk
from drafters.target import Target
from inference.served import Engine
from inference.served.states import StateServer
from training.batches import documents
from training.examples import Example
from training.features import Lessons
from training.options import TrainSettings
from training.served_states import ServedStates


def load_target(settings: TrainSettings, device: str) -> Target:
    """Load a run's target as far as this process needs it; its answers lie on `device`.

    Raises:
        UserError: if it cannot be loaded, or something is asked for that needs its layers here.
    """
    dtype = settings.target_dtype
    if settings.spread.device_map:
        places = settings.spread.arguments()
        return Target.load(settings.target, dtype=dtype, device=device, **places)
    if not settings.features.engine:
        return Target.load(settings.target, dtype=dtype, device=device)
    settings.refuse(
        ("adapter.rank", "on_policy.share", "tracking.benchmark"),
        "which runs the target's layers in this process, and with features.engine they are not "
        "here: leave one of the two out",
    )
    places = layers_on_disk(load_config(settings.target, "target"), device)
    return Target.load(
        settings.target,
        dtype=dtype,
        device_map=places,
        offload_folder=settings.features.offload_folder or None,
    )


def served_states(
    settings: TrainSettings,
    target: Target,
    layers: tuple[int, ...],
    sides: Sequence[Sequence[Example]],
    groups: Sequence[Sequence[Sequence[int]]],
) -> ServedStates | None:
    """Return what makes the states of a run's examples, None where the target itself does.

    Args:
        settings: of the run.
        target: as `load_target` returns it.
        layers: whose outputs are taken.
        sides: examples to learn from, and to measure on.
        groups: of each side, indices of the examples that are asked for together.
    """
    if not settings.features.engine:
        return None
    longest = max(len(chat.ids) for side in sides for chat in documents(side))
    tokens = max(
        sum(len(side[index]) for index in group)
        for side, composed in zip(sides, groups, strict=True)
        for group in composed
    )

    def start() -> StateServer:
        engine = Engine.built(settings.features.engine)
        return StateServer(
            engine.root,
            target.folder,
            settings.target_dtype,
            longest=longest,
            tokens=tokens,
            threads=settings.threads or engine.threads,
            options=settings.features.engine_options,
        )

    dtype = getattr(torch, settings.features.stored_dtype)
    return ServedStates(start, target, layers, dtype, settings.loss.chunk)


def check_served(settings: TrainSettings, sides: Sequence[Lessons], processes: int) -> list[str]:
    """Refuse what would be found out only when states are missing.

    Returns:
        What such a run leaves out, for a person.

    Raises:
        UserError: if states are missing and the engine is not here, or several processes would
            start one each.
    """
    if not settings.features.engine:
        return []
    missing = not all(side.is_stored(index) for side in sides for index in range(len(side)))
    if missing:
        Engine.built(settings.features.engine)
    if missing and processes > 1:
        raise UserError(
            f"features.engine: {processes} processes would start an engine each: run "
            "scripts/store_features.py with these settings first, then train on what it stored"
        )
    prompts = settings.evaluate.prompts and settings.evaluate.times
    return ["tau is not measured: the target's layers are not in this process"] if prompts else []

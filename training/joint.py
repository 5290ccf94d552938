"""Joint: a drafter and its target's adapter, trained together; the target itself stays frozen.

The adapted target's own law is held to the frozen one's while the drafter learns from the adapted
states, so that the target comes to say in its states what the drafter needs. What is published is
the drafter, made for the target with the adapter merged in, and that adapter beside it.
Source: Medusa-2 with self-distillation (Cai et al. 2024, arXiv 2401.10774, sections 2.2 and 2.3).
"""

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from drafters.adapter import ADAPTER, PREFIX, Adapter
from drafters.base import Batch, DraftSession, Features, NeuralDrafter, Prediction
from drafters.checkpoint import save_drafter
from drafters.errors import UserError
from drafters.growth import Growth
from drafters.int8 import quantisation
from drafters.reference import ReferenceModel
from drafters.sequences import run_sequences
from drafters.target import Target
from drafters.teacher import taught
from training.target_settings import AdapterSettings


class TargetAdapter(nn.Module):
    """Low-rank updates beside every linear map of a target's layers; they change nothing yet.

    Args:
        target: its weights are read where they are, and neither trained nor saved.
        settings: rank, alpha and dropout.

    Raises:
        UserError: if nothing could be merged into its weights exactly.
    """

    def __init__(self, target: Target, settings: AdapterSettings) -> None:
        """Make the updates, by peft, on a model that shares the target's weights."""
        super().__init__()
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        _check(target)
        shared = {id(p): p for p in target.model.parameters()}
        model: Any = deepcopy(target.model, shared)
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules="all-linear",
        )
        inject_adapter_in_model(config, model)
        self.settings = {
            "r": settings.rank,
            "lora_alpha": settings.alpha,
            "target_modules": sorted(cast("set[str]", config.target_modules)),
        }
        self.updates = nn.ModuleDict()
        for name, layer in model.named_modules():
            if isinstance(layer, LoraLayer):
                parts = {x: getattr(layer, x)["default"] for x in ("lora_A", "lora_B")}
                own = nn.ModuleDict({**parts, "dropout": layer.lora_dropout})
                self.updates[name.replace(".", "/")] = own
        self._model = ReferenceModel.of(model, target.name)  # no module of this one

    def states(self, batch: Batch, layers: tuple[int, ...]) -> Batch:
        """Return a batch with the adapted target's states, which carry a gradient."""
        taps, last = run_sequences(self._model, batch.ids, batch.document, batch.position, layers)
        return Batch(batch.ids, batch.label_mask, batch.document, batch.position, taps, last)

    def stored(self, target: Target) -> Adapter:
        """Return the updates as of now, in PEFT's terms."""
        tensors = {
            f"{PREFIX}{name.replace('/', '.')}.{part}.weight": parts[part].weight.detach().clone()
            for name, parts in cast("Mapping[str, Any]", self.updates).items()
            for part in ("lora_A", "lora_B")
        }
        place = Path(target.name)
        base = str(place.resolve()) if place.is_dir() else target.name
        return Adapter(base, self.settings, tensors, f"{target.name} + {ADAPTER}")


class Joint(NeuralDrafter):
    """A drafter whose target learns along.

    Args:
        drafter: reads the adapted target's states.
        target: frozen.
        settings: of the adapter.

    Raises:
        UserError: as TargetAdapter.
    """

    name = "joint"

    def __init__(self, drafter: NeuralDrafter, target: Target, settings: AdapterSettings) -> None:
        """Add the adapter."""
        super().__init__()
        self.drafter = drafter
        self.adapter = TargetAdapter(target, settings).to(target.device)
        # it runs the target's layers itself: of the frozen one it needs what teaches
        self.features = Features(last=drafter.features.last)
        self._served: tuple[str, Target] | None = None

    @property
    def ids(self) -> Tensor | None:
        """Return the drafter's vocabulary."""
        return self.drafter.ids

    def options(self) -> dict[str, object]:
        """Return the drafter's options."""
        return self.drafter.options()

    def init_from(self, target: Target) -> None:
        """Start the drafter; the adapter changes nothing."""
        self.drafter.init_from(target)

    def predict(self, batch: Batch, target: Target) -> list[Prediction]:
        """Return the adapted target's own law, at depth 0 and on all ids, then the drafter's."""
        seen = self.adapter.states(batch, self.drafter.features.layers)
        places = taught(batch).nonzero()[:, 0]
        own = partial(_own_logits, target, seen.last.flatten(0, 1)[places])
        drafted = self.drafter.predict(seen, target)
        return [Prediction(places, 0, places, own), *drafted]

    def calibrate(self, confidence: Tensor, taken: Tensor) -> None:
        """Fit the drafter's confidence."""
        self.drafter.calibrate(confidence, taken)

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> DraftSession:
        """Start a session of the drafter; `target` is the one that `served_by` returns."""
        return self.drafter.start(target, growth, rows, capacity)

    def served_by(self, target: Target) -> Target:
        """Return the target with the adapter as of now merged in."""
        adapter = self.adapter.stored(target)
        if self._served is None or self._served[0] != adapter.digest:
            self._served = None  # its memory goes to the next one
            model = deepcopy(target.model)
            adapter.merge_into(model)
            merged = Target(model, target.tokenizer, name=adapter.place, engine=target.engine)
            self._served = adapter.digest, merged
        return self._served[1]


def served_by(drafter: NeuralDrafter, target: Target) -> Target:
    """Return the target that decides for a drafter: the given one, unless it learned along."""
    return drafter.served_by(target) if isinstance(drafter, Joint) else target


def served_from(folder: Path, target: Target) -> Target:
    """Return the target that decides for a published drafter: the given one, or its own."""
    if not (folder / ADAPTER).is_dir():
        return target
    return Target.load(folder / ADAPTER, device=str(target.device), engine=target.engine)


def publish(
    drafter: NeuralDrafter,
    folder: Path,
    target: Target,
    training: Mapping[str, Any],
    dtype: torch.dtype,
) -> Path:
    """Write a drafter's folder, with the adapter of its target in it where that learned along.

    Args:
        drafter: its parameters are numbers of `dtype` where it is a joint one.
        folder: replaced as a whole.
        target: the frozen one.
        training: see save_drafter.
        dtype: of the saved parameters.
    """
    if not isinstance(drafter, Joint):
        return save_drafter(drafter, folder, target, training, dtype)
    adapter = drafter.adapter.stored(target)
    served = drafter.served_by(target)

    def beside(new: Path) -> None:
        adapter.to(dtype).write(new / ADAPTER, target.tokenizer)

    return save_drafter(drafter.drafter, folder, served, training, dtype, beside)


def _own_logits(target: Target, last: Tensor, span: slice) -> Tensor:
    return target.head(last[span].to(target.dtype))


def _check(target: Target) -> None:
    how = str(target.dtype).replace("torch.", "in ")
    if quantisation(target.model.config):
        how = "quantised"
    elif getattr(target.model.config, "adapter", ""):
        how = "made with an adapter already"
    if how != "in float32":
        raise UserError(
            f"adapter.rank asks for an adapter of {target.name}, which is {how}: give a plain "
            "target and target_dtype=float32, or adapter.rank=0"
        )

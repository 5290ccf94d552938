"""Spread: a target whose layers lie on several devices, or partly on disk, by accelerate.

Layers that are elsewhere bring their inputs and outputs along at every call. Embedding and head are
read directly by drafters, losses and the engine, so the target holds both on one device, where its
answers lie: the model's own, or copies.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from drafters.errors import UserError
from drafters.reference import decoder_layers

PLANS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class Spread:
    """Where the parts of a target go.

    Args:
        device_map: a plan of accelerate's (auto, balanced, sequential), or devices by module name.
        max_memory: bytes, or such as "20GiB", by device; None: what is free.
        offload_folder: takes a copy of what stays on the disk where a checkpoint stores it
            otherwise than it is computed with, as mixtures store their experts.

    Raises:
        UserError: if there is no such plan, or memory is given that no plan takes.
    """

    device_map: str | Mapping[str, Any]
    max_memory: Mapping[Any, Any] | None = None
    offload_folder: str | Path | None = None

    def __post_init__(self) -> None:
        """Check that there is such a plan."""
        if isinstance(self.device_map, str) and self.device_map not in PLANS:
            raise UserError(
                f"device_map is {self.device_map!r}: give {', '.join(PLANS)}, or devices by "
                "module name"
            )
        if self.max_memory and not isinstance(self.device_map, str):
            raise UserError(
                "max_memory is what a plan may take: leave it out beside devices by module name"
            )

    @property
    def devices(self) -> list[str | int]:
        """Return the devices that it names."""
        places = {} if isinstance(self.device_map, str) else self.device_map
        named = [*places.values(), *(self.max_memory or {})]
        return [x if isinstance(x, int) else str(x) for x in named if x != "disk"]

    def arguments(self) -> dict[str, Any]:
        """Return what from_pretrained takes."""
        plan = self.device_map if isinstance(self.device_map, str) else dict(self.device_map)
        return {
            "device_map": plan,
            "max_memory": None if self.max_memory is None else dict(self.max_memory),
            "offload_folder": self.offload_folder,
        }


def asked_spread(
    device_map: str | Mapping[str, Any] | None,
    max_memory: Mapping[Any, Any] | None,
    offload_folder: str | Path | None,
    engine: str | None,
    weights: str | None,
) -> Spread | None:
    """Return how a target is spread by Target.load's arguments, None if it is not.

    Raises:
        UserError: what belongs to a map comes without one, or only one device can do it.
    """
    if device_map is None:
        for name, value in (("max_memory", max_memory), ("offload_folder", offload_folder)):
            if value is not None:
                raise UserError(f"{name} belongs to device_map: give device_map='auto' too")
        return None
    if weights is not None:
        raise UserError("weights and device_map exclude each other: leave one out")
    if engine not in (None, "reference"):
        raise UserError(
            f"engine {engine} holds all layers on one device: give engine reference with "
            "device_map, or none"
        )
    return Spread(device_map, max_memory, offload_folder)


def layers_on_disk(config: Any, device: str) -> dict[str, str]:
    """Return the device_map of a target of which a device holds all but the layers.

    Args:
        config: its text config.
        device: holds embedding, norm and head.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    layers = set(decoder_layers(model.base_model, config.num_hidden_layers))
    return {name: "disk" if part in layers else device for name, part in _parts(model, layers)}


def _parts(module: nn.Module, layers: set[nn.Module], prefix: str = "") -> Iterator[Any]:
    """Yield layers and what has none in it, by name."""
    for name, child in module.named_children():
        place = f"{prefix}{name}"
        if child in layers or layers.isdisjoint(child.modules()):
            yield place, child
        else:
            yield from _parts(child, layers, f"{place}.")


def weight_of(model: Any, name: str, tensor: Tensor) -> Tensor:
    """Return a weight of a model by its name, read from the disk if it stays there."""
    if not tensor.is_meta:
        return tensor
    # a third of what every command imports, and the least used
    from transformers.integrations.accelerate import load_offloaded_parameter

    return load_offloaded_parameter(model, name)


def weight_on(device: torch.device, model: Any, tensor: Tensor) -> Tensor:
    """Return a parameter of a model on a device: itself if it is there, else a copy."""
    if tensor.is_meta:
        (name,) = (name for name, parameter in model.named_parameters() if parameter is tensor)
        tensor = weight_of(model, name, tensor)
    return tensor.to(device)


def check_spread(model: Any, name: str) -> None:
    """Refuse a model whose embedding or head no device holds.

    Args:
        model: the Hugging Face model with its head.
        name: of the target.

    Raises:
        UserError: names the part.
    """
    parts = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    for part, module in parts.items():
        if module.weight.is_meta:
            raise UserError(
                f"target {name}: its {part} is not held by a device under this device_map, and "
                "drafters read it in every step; give device, which takes a copy of embedding and "
                "head, a device_map that keeps them on one, or more max_memory"
            )

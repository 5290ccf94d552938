"""Adapter: a folder in PEFT's own format is a target, its base with low-rank updates merged in.

What decides is then base and adapter together; merged before anything is packed, so that the
engine knows nothing of it. The folder is somebody else's: its base is loaded as any target is, of
its settings those are read that say how the updates are merged, and nothing in it is run.
Source: LoRA (Hu et al. 2022, arXiv 2106.09685).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafters.errors import UserError
from drafters.untrusted import INDEX, read_object, refuse_pickles

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER = "adapter"  # the folder in a drafter's own, where its target learned along
BASE = "base_model_name_or_path"
PREFIX = "base_model.model."  # PEFT puts it before the names of the model's own modules

_READ = {  # how updates are laid out and scaled
    "alpha_pattern",
    "bias",
    "exclude_modules",
    "fan_in_fan_out",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_bias",
    "modules_to_save",
    "r",
    "rank_pattern",
    "target_modules",
    "use_dora",
    "use_rslora",
}
_REFUSED = {  # not a sum of base and update
    "alora_invocation_tokens",
    "arrow_config",
    "layer_replication",
    "megatron_config",
    "use_qalora",
}
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the base


@dataclass(frozen=True)
class Adapter:
    """Low-rank updates of a causal LM.

    Args:
        base: folder or hub id of the model that they are for.
        settings: of PEFT's LoraConfig, as far as merging needs them.
        tensors: by PEFT's names.
        place: what errors call it.
    """

    base: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    place: str

    @classmethod
    def read(cls, folder: str | Path) -> "Adapter":
        """Read a folder.

        Raises:
            UserError: if it is not a LoRA adapter in safetensors that merges into its base.
        """
        place = Path(folder)
        values = read_object(place / CONFIG)
        kind, start = values.get("peft_type"), values.get("init_lora_weights")
        if kind != "LORA":
            raise UserError(f"{place}: its peft_type is {kind!r}: only LORA is merged into a base")
        refused = sorted(name for name in _REFUSED if values.get(name))
        if refused or start not in _STARTS:
            name = refused[0] if refused else "init_lora_weights"
            raise UserError(
                f"{place}: its {name} is {values[name]!r}, so it is no update of its base alone: "
                "merge it by peft (merge_and_unload) and give the folder of the merged model"
            )
        return cls(
            base_in(place),
            {name: values[name] for name in sorted(_READ) if values.get(name)},
            _tensors(place),
            str(place),
        )

    @property
    def digest(self) -> str:
        """Return a digest of the updates, equal in any dtype that holds them."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(name.encode())
            digest.update(self.tensors[name].detach().to("cpu", torch.float32).numpy().tobytes())
        return digest.hexdigest()[:16]

    def to(self, dtype: torch.dtype) -> "Adapter":
        """Return the same with tensors of this dtype."""
        return replace(self, tensors={name: t.to(dtype) for name, t in self.tensors.items()})

    def write(self, folder: Path, tokenizer: Any = None) -> None:
        """Write a folder that is a whole target, as PEFT and `Target.load` read it.

        Args:
            folder: made if needed.
            tokenizer: of the target, or None.
        """
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            BASE: self.base,
            **self.settings,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        save_file(
            {n: t.cpu().contiguous() for n, t in self.tensors.items()},
            folder / WEIGHTS,
            metadata={"format": "pt"},
        )
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def merge_into(self, model: Any) -> None:
        """Add the updates to a model's weights, in place, and note them in its config.

        The sum is made in float64, so that it is the same numbers on every machine.

        Args:
            model: the base in float32, with weights of its own.

        Raises:
            UserError: if they do not fit.
        """
        from peft import (
            LoraConfig,
            get_peft_model_state_dict,
            inject_adapter_in_model,
            set_peft_model_state_dict,
        )

        try:
            settings = dict(self.settings)
            self._check_ranks()
            inject_adapter_in_model(LoraConfig(**settings), model, low_cpu_mem_usage=True)
            # what the config asks for must be in the file, and nothing else
            own = get_peft_model_state_dict(model, save_embedding_layers=False)
            wanted = {name: tuple(tensor.shape) for name, tensor in own.items()}
            tensors = self._updates()
            found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            if wanted != found:
                differing = sorted(set(wanted.items()) ^ set(found.items()))
                raise UserError(
                    f"{self.place}: {len(differing)} tensors differ from what its config asks of "
                    f"its base, such as {differing[0][0]}: it was made for another model"
                )
            set_peft_model_state_dict(model, tensors, low_cpu_mem_usage=True)
            fold(model)
        except UserError:
            raise
        except Exception as error:  # whatever peft makes of somebody's settings
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(f"{self.place} does not merge into its base: {reason}") from error
        model.requires_grad_(False)
        text = model.config.get_text_config()
        text.base_model_name_or_path = getattr(text, BASE, None) or self.base
        model.config.adapter = text.adapter = self.digest

    def _check_ranks(self) -> None:
        """Refuse ranks that no tensor has, before memory is taken for them."""
        largest = max((max(t.shape, default=0) for t in self.tensors.values()), default=0)
        ranks = [self.settings.get("r", 8), *self.settings.get("rank_pattern", {}).values()]
        if max(ranks) > largest:
            raise UserError(f"{self.place}: its tensors hold no updates of rank {max(ranks)}")

    def _updates(self) -> dict[str, Tensor]:
        """Return the tensors by the model's own names, without copies of the base's."""
        named = {name.removeprefix(PREFIX): tensor for name, tensor in self.tensors.items()}
        return {name: tensor for name, tensor in named.items() if ".base_layer." not in name}


def is_adapter(path: str | Path) -> bool:
    """Tell whether a path is the folder of an adapter without a whole model."""
    place = Path(path)
    whole = any((place / name).exists() for name in ("model.safetensors", INDEX))
    return (place / CONFIG).is_file() and not whole


def base_in(folder: str | Path) -> str:
    """Return the base that an adapter's folder names.

    Raises:
        UserError: if it names none, or another adapter.
    """
    base = read_object(Path(folder) / CONFIG).get(BASE)
    if not isinstance(base, str) or not base:
        raise UserError(f"{folder}: its {CONFIG} names no base: put a folder or hub id at {BASE}")
    if is_adapter(base):
        raise UserError(f"{folder}: its base {base} is an adapter too: merge that one first")
    return base


@torch.no_grad()
def fold(model: nn.Module) -> None:
    """Replace PEFT's layers in place by plain ones with their updates added."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    for name, layer in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if isinstance(layer, LoraLayer):
            lora: Any = layer
            plain = lora.get_base_layer()
            dtype = plain.weight.dtype
            lora.double()
            lora.merge(safe_merge=True)
            setattr(model.get_submodule(parent), own, plain.to(dtype))
        elif isinstance(layer, ModulesToSaveWrapper):
            setattr(model.get_submodule(parent), own, layer.modules_to_save["default"])
    del model.peft_config


def _tensors(folder: Path) -> dict[str, Tensor]:
    if not (folder / WEIGHTS).exists():
        refuse_pickles(folder, WEIGHTS)
    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{folder / WEIGHTS} cannot be read ({error}): only whole safetensors are read, "
            "copy it again"
        ) from error

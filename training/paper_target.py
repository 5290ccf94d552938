"""PaperTarget: the sizes of a target that is not here, counted on a model without data."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from drafters.errors import UserError
from drafters.selftest import check_kind
from drafters.settings import find_config
from drafters.shape import TargetShape
from inference.experts import expected_experts

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as families call them


@dataclass(frozen=True)
class PaperTarget:
    """Sizes of a target.

    Args:
        name: as it was given.
        shape: what drafters are built from.
        parameters: all of them.
        body: those that every token passes through, experts, embedding and head left out.
        table: values of the embedding; the head has as many.
        expert: values of the routed experts, all layers and experts together.
        experts, chosen: experts of a layer, and how many of them a token passes through.
    """

    name: str
    shape: TargetShape
    parameters: int
    body: int
    table: int
    expert: int = 0
    experts: int = 1
    chosen: int = 1

    @property
    def active(self) -> float:
        """Return the values that a token passes through between embedding and head."""
        return self.body + self.expert * self.chosen / self.experts

    def read(self, tokens: int) -> float:
        """Return the values that a forward over so many tokens reads, if routing is even."""
        hit = expected_experts(tokens, self.experts, self.chosen) / self.experts
        return self.body + self.table + self.expert * hit


def paper_target(name: str) -> PaperTarget:
    """Read a target's sizes.

    Args:
        name: one of configs/targets, a config.json (or YAML with its keys), or a folder with one.

    Raises:
        UserError: if there is none, or of a kind that cannot be served.
    """
    values = dict(_values(name))
    kind = values.pop("model_type", None)
    try:
        config = AutoConfig.for_model(kind, **values).get_text_config()
    except (ValueError, TypeError, StrictDataclassError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"target {name}: {first}; give the config.json of a causal LM") from error
    check_kind(config)
    loader: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = loader.from_config(config)
    sizes = {id(p): p for p in model.parameters()}.values()
    table = model.get_input_embeddings().weight.numel()
    tied = config.tie_word_embeddings
    own = config.to_dict()
    experts = next((own[key] for key in _EXPERTS if own.get(key)), 1)
    # transformers keeps the experts of a layer in one tensor a map
    expert = sum(p.numel() for p in sizes if p.dim() == 3 and len(p) == experts)
    whole = sum(p.numel() for p in sizes)
    return PaperTarget(
        name=name,
        shape=TargetShape.of(config, model.get_input_embeddings().weight.shape[0]),
        parameters=whole,
        body=whole - expert - table * (1 if tied else 2),
        table=table,
        expert=expert,
        experts=experts,
        chosen=own["num_experts_per_tok"] if expert else 1,
    )


def _values(name: str) -> Mapping[str, Any]:
    given = Path(name)
    file = given / "config.json" if given.is_dir() else given
    if not file.is_file():
        file = find_config(f"targets/{name}.yaml")
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"target {file} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(found, dict) or "model_type" not in found:
        raise UserError(f"target {file} names no model_type: give the config.json of a causal LM")
    return found

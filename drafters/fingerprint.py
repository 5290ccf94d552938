"""Fingerprint: which target a drafter was made for, and the first difference to another one."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from drafters.digest import digest
from drafters.int8 import quantisation
from drafters.spread import weight_of
from drafters.target import Target

_SAMPLED = 4096  # values of each tensor that enter the weights' digest


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a target.

    Args:
        name: as it was loaded; informative only.
        architecture: class of the model.
        base: the model this one is a converted or quantised copy of, "" if it says nothing.
        hidden_size, num_layers, vocab_size: its sizes.
        tokenizer: digest of the tokenizer's ids and chat template; "" without a tokenizer.
        weights: digest over evenly spaced values of every tensor; "" where a server held them.
        quantisation: how its weights are quantised, "" if they are not.
        adapter: digest of what was merged into the base, "" if nothing was.
    """

    name: str
    architecture: str
    base: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    tokenizer: str
    weights: str
    quantisation: str = ""
    adapter: str = ""

    @classmethod
    def of(cls, target: Target) -> "Fingerprint":
        """Take a target's fingerprint; milliseconds."""
        config = target.config.to_dict()
        quantised = quantisation(target.model.config)
        base = config.get("base_model_name_or_path") or (target.name if quantised else "")
        return cls(
            name=target.name,
            architecture=type(target.model).__name__,
            base=str(base),
            hidden_size=target.shape.hidden_size,
            num_layers=target.shape.num_layers,
            vocab_size=target.shape.vocab_size,
            tokenizer=_tokenizer_digest(target.tokenizer),
            weights=_weights_digest(_weights(target.model)),
            quantisation=quantised,
            adapter=str(config.get("adapter") or ""),
        )

    @classmethod
    def without_weights(cls, name: str, config: Any, tokenizer: Any) -> "Fingerprint":
        """Take the fingerprint of a target whose weights another process holds.

        Args:
            name: as it is loaded.
            config: its text config.
            tokenizer: its own.
        """
        base = getattr(config, "base_model_name_or_path", None)
        return cls(
            name=name,
            architecture=(config.architectures or [""])[0],
            base=base or "",
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            vocab_size=config.vocab_size,
            tokenizer=_tokenizer_digest(tokenizer),
            weights="",
            quantisation=quantisation(config),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def difference(self, other: "Fingerprint") -> tuple[str, Any, Any] | None:
        """Return the first differing field with both values.

        The name does not count, nor do weights that one of the two has not seen.
        """
        mine, theirs = asdict(self), asdict(other)
        for key in ("hidden_size", "vocab_size", "num_layers", "architecture", "tokenizer"):
            if mine[key] != theirs[key]:
                return key, mine[key], theirs[key]
        for key in ("adapter", "quantisation", "weights"):
            unseen = key == "weights" and "" in (mine[key], theirs[key])
            if mine[key] != theirs[key] and not unseen:
                return key, mine[key] or "none", theirs[key] or "none"
        return None

    def same_model(self, other: "Fingerprint") -> bool:
        """Tell whether both name one model that they are conversions of."""
        mine, theirs = self.base, other.base
        return bool((mine and mine in (theirs, other.name)) or (theirs and theirs == self.name))


def template_digest(tokenizer: Any) -> str:
    """Return the digest of a tokenizer's chat template; "" without one."""
    template = None if tokenizer is None else tokenizer.chat_template
    return "" if not template else digest(str(template))


def _weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield what a model computes with, by name: parameters, and buffers of quantised maps."""
    tensors = dict(model.named_parameters())
    if quantisation(model.config):
        tensors |= dict(model.named_buffers())
    for name in sorted(tensors):
        yield name, weight_of(model, name, tensors[name])


def _weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash evenly spaced values of every tensor, rounded to bfloat16: equal in any served dtype."""
    hashed = hashlib.sha256()
    for name, tensor in tensors:
        flat = tensor.detach().flatten()
        step = max(1, len(flat) // _SAMPLED)
        values = flat[::step].to("cpu", torch.bfloat16).view(torch.int16)
        hashed.update(name.encode())
        hashed.update(values.numpy().tobytes())
    return hashed.hexdigest()[:16]


def _tokenizer_digest(tokenizer: Any) -> str:
    if tokenizer is None:
        return ""
    vocabulary = sorted(tokenizer.get_vocab().items())
    text = json.dumps([vocabulary, tokenizer.chat_template])
    return digest(text)

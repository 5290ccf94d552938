"""Readers: what turning chats into ids needs of a target, which is not its weights."""

from dataclasses import dataclass
from typing import Any, Protocol

from transformers import GenerationConfig

from drafters.adapter import base_in, is_adapter
from drafters.fingerprint import Fingerprint
from drafters.loading import load_config, load_tokenizer
from drafters.shape import TargetShape


class ChatReader(Protocol):
    """A target as far as chats are concerned; every Target is one."""

    @property
    def name(self) -> str:
        """Return how messages call it."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Return its tokenizer, None if there is none."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Return the ids that end an answer."""
        ...

    @property
    def shape(self) -> TargetShape:
        """Return its sizes."""
        ...


@dataclass(frozen=True)
class WeightlessReader:
    """A target without its weights, to look at chats in a second.

    Args:
        name, tokenizer, eos_ids, shape: see ChatReader.
        fingerprint: as far as it is known without weights.
    """

    name: str
    tokenizer: Any
    eos_ids: frozenset[int]
    shape: TargetShape
    fingerprint: Fingerprint

    @classmethod
    def load(cls, path: str) -> "WeightlessReader":
        """Read the tokenizer and the configs of a folder or hub id.

        Raises:
            UserError: if they are not there.
        """
        config, tokenizer = load_config(path, "target"), load_tokenizer(path, "target")
        try:
            place = base_in(path) if is_adapter(path) else path
            ends = GenerationConfig.from_pretrained(place).eos_token_id
        except OSError:
            ends = config.eos_token_id
        ids = [] if ends is None else ends if isinstance(ends, list) else [ends]
        shape = TargetShape.of(config, config.vocab_size)
        fingerprint = Fingerprint.without_weights(path, config, tokenizer)
        return cls(path, tokenizer, frozenset(ids), shape, fingerprint)

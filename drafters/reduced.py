"""ReducedDrafter: what every neural drafter with logits on a draft vocabulary has in common.

Its options are a dataclass, its vocabulary is saved with its weights, and what it starts from is
the target's own head on the ids that it keeps. Layers, features and alignment belong to a family.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from drafters.base import NeuralDrafter
from drafters.options import fill_options
from drafters.shape import TargetShape
from drafters.target import Target
from drafters.vocab import DraftVocabulary


class ReducedOptions(Protocol):
    """A family's dataclass of options."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    draft_vocab_size: int


Options = TypeVar("Options", bound=ReducedOptions)


class ReducedDrafter(NeuralDrafter, Generic[Options]):
    """A neural drafter made from a dataclass of options, `schema`, and a target's shape.

    Args:
        config: options; draft_vocab_size is resolved here, 0 if all ids are kept.
        shape: of the target.

    Attributes:
        made_for: the shape of its target, which `shape` is unless a family says otherwise.
    """

    schema: ClassVar[type[Any]]

    def __init__(self, config: Options, shape: TargetShape) -> None:
        """Make the vocabulary; a family adds its weights."""
        super().__init__()
        self.vocabulary = DraftVocabulary(config.draft_vocab_size, shape.vocab_size)
        self.config = replace(config, draft_vocab_size=self.vocabulary.size)
        self.shape = self.made_for = shape

    @classmethod
    def build(cls, options: Mapping[str, object], shape: TargetShape) -> Self:
        """Make an untrained one from its options; see `schema`."""
        return cls(fill_options(cls.name, cls.schema, options), shape)

    def options(self) -> dict[str, object]:
        """Return the resolved options."""
        return asdict(self.config)

    @property
    def ids(self) -> Tensor | None:
        """Return the draft vocabulary."""
        return self.vocabulary.ids

    def head_rows(self, target: Target) -> Tensor:
        """Return a model's head [K, D] on the ids of this drafter."""
        ids = torch.arange(len(self.vocabulary)) if self.ids is None else self.ids
        return target.head_rows(ids)

    def target_logits(self, target: Target) -> Callable[[Tensor], Tensor]:
        """Return the target's own head on the ids of this drafter, for states of any dtype."""
        ids = None if self.ids is None else self.ids.to(target.device)
        return lambda state: target.head(state.to(target.dtype), ids)

"""`draft_model`: any Hugging Face causal LM of the target's vocabulary drafts by decoding ahead.

It reads nothing of the target's: final tokens go into its own cache, and its own law guesses the
next. A context shorter than the target's ends the drafting of a row, not the row.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from drafters.base import Commit, Features
from drafters.cache import KVCache
from drafters.errors import UserError
from drafters.frontier import Frontier, FrontierCells
from drafters.growth import Growth
from drafters.placement import Placement
from drafters.registry import reads_causal_lms, register
from drafters.session import CachedSession, Final
from drafters.shape import TargetShape
from drafters.target import Target


@register
@reads_causal_lms
class DraftModel:
    """A causal LM that drafts.

    Args:
        model: the causal LM, held as targets are.
    """

    name: ClassVar[str] = "draft_model"
    features = Features()

    def __init__(self, model: Target) -> None:
        """Keep the model."""
        self.model = model
        self._fits: Target | None = None

    @classmethod
    def build(cls, options: Mapping[str, object], shape: TargetShape) -> "DraftModel":
        """Make one from its only option: `model`, a folder, a hub id or a Target.

        Raises:
            UserError: on another option, or a model that cannot be loaded.
        """
        model = options.get("model")
        if set(options) != {"model"} or not isinstance(model, str | Path | Target):
            raise UserError(
                f"drafter {cls.name} has one option, model: give the folder or hub id of a causal "
                f"LM; got {', '.join(options) or 'none'}"
            )
        return cls(model if isinstance(model, Target) else Target.load(model))

    @classmethod
    def load(cls, folder: str | Path, target: Target | None = None) -> "DraftModel":
        """Load a causal LM's folder, in the target's dtype and place if one is given.

        Raises:
            UserError: if it cannot be loaded or has another vocabulary than the target.
        """
        if target is None:
            return cls(Target.load(folder))
        drafter = cls(Target.load(folder, dtype=target.dtype, device=str(target.device)))
        drafter.check(target)
        return drafter

    def check(self, target: Target) -> None:
        """Refuse a target of another vocabulary; compared once a target.

        Raises:
            UserError: names both sizes, or the first id that stands for another string.
        """
        if self._fits is not target:
            _check_vocabulary(self.model, target)
            self._fits = target

    def options(self) -> dict[str, object]:
        """Return the model by name."""
        return {"model": self.model.name}

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "ModelSession":
        """Start a session with a cache of the model's own.

        Raises:
            UserError: if the vocabularies differ.
        """
        self.check(target)
        model, wanted = WholeModel(self.model, target.shape.vocab_size), target.shape.vocab_size
        ids = None if model.width == wanted else torch.arange(model.width, device=model.device)
        return ModelSession(model, ids, growth, rows, capacity)


def _check_vocabulary(model: Target, target: Target) -> None:
    ours, theirs = model.tokenizer, target.tokenizer
    if ours is None or theirs is None:
        sizes = model.shape.vocab_size, target.shape.vocab_size
    else:
        sizes = len(ours), len(theirs)
    if sizes[0] != sizes[1]:
        raise UserError(
            f"draft model {model.name} has a vocabulary of {sizes[0]} ids, target {target.name} "
            f"one of {sizes[1]}: give a model of the target's own tokenizer, or draft by text with "
            f"universal:model={model.name}"
        )
    if ours is None or theirs is None:
        return
    strings = _strings(ours), _strings(theirs)
    for token, (mine, wanted) in enumerate(zip(*strings, strict=True)):
        if mine != wanted:
            raise UserError(
                f"id {token} is {mine!r} for draft model {model.name} and {wanted!r} for target "
                f"{target.name}: give a model of the target's own tokenizer, or draft by text with "
                f"universal:model={model.name}"
            )


def _strings(tokenizer: Any) -> list[str]:
    return tokenizer.convert_ids_to_tokens(range(len(tokenizer)))


class Decodes(Protocol):
    """A causal LM as its session sees it."""

    shape: TargetShape
    width: int
    dtype: torch.dtype
    device: torch.device

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """Return an empty cache."""
        ...

    def decode(
        self, tokens: Tensor, placement: Placement, cache: KVCache, wanted: Tensor | None = None
    ) -> Tensor:
        """Run M placed tokens and return logits [m, width] of all, or of the wanted ones."""
        ...


class WholeModel:
    """A causal LM held as targets are; padding of its table beyond the target's is cut."""

    def __init__(self, model: Target, vocab_size: int) -> None:
        """Keep the model."""
        self.model, self.shape = model, model.shape
        self.dtype, self.device = model.dtype, model.device
        self.width = min(vocab_size, model.shape.vocab_size)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """Return an empty cache."""
        return self.model.new_cache(rows, capacity)

    def decode(
        self, tokens: Tensor, placement: Placement, cache: KVCache, wanted: Tensor | None = None
    ) -> Tensor:
        """Run M placed tokens and return logits [m, width] of all, or of the wanted ones."""
        logits, _, _ = self.model.forward(tokens, placement, cache, Features(), wanted)
        return logits[:, : self.width]


class ModelSession(CachedSession):
    """Rows that one causal LM drafts for.

    Args:
        model: the causal LM.
        ids: [width] the tokens that its logits stand for; None: the target's own.
        growth: the shape of the trees.
        rows: batch size.
        capacity: tokens a row may hold.
    """

    def __init__(
        self, model: Decodes, ids: Tensor | None, growth: Growth, rows: int, capacity: int
    ) -> None:
        """Allocate the cache."""
        # the deepest guess that is fed lies depth - 2 positions behind the last final token
        reach = model.shape.max_positions - growth.depth + 1
        room = max(0, min(capacity, reach))
        super().__init__(Features(), growth, model.new_cache(rows, room + growth.cells), room)
        self.model, self.ids = model, ids
        self.laws = torch.zeros(rows, model.width, dtype=model.dtype, device=model.device)

    def final(self, commit: Commit) -> Final:
        """Take the new root too; the old one was taken with its own commit."""
        known = commit.inputs if commit.tree is None else commit.inputs[1:]
        return Final(torch.cat((known, torch.tensor([commit.root]))), None)

    def encode(self, final: Final, placement: Placement, ends: Tensor, rows: list[int]) -> None:
        """Run final tokens; keep each row's law of the token after its root."""
        self.laws[rows] = self.model.decode(final.tokens, placement, self.cache, ends)

    def guesser(self, rows: list[int]) -> "ModelGuesser":
        """Start a round for these rows."""
        return ModelGuesser(self, rows)


class ModelGuesser:
    """One round of a session's rows."""

    def __init__(self, session: ModelSession, rows: list[int]) -> None:
        """Start at the roots."""
        self.session, self.rows, self.ids = session, rows, session.ids
        self.cells = FrontierCells(session.cache, rows)

    def root_logits(self) -> Tensor:
        """Return the logits [R, K] of the token after each root."""
        return self.session.laws[self.rows]

    def step(self, frontier: Frontier) -> Tensor:
        """Return the logits [R, F, K] of the token after each node."""
        session = self.session
        placement = self.cells.place(frontier)
        logits = session.model.decode(frontier.tokens.flatten(), placement, session.cache)
        return logits.view(*frontier.tokens.shape, -1)

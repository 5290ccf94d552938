"""`draft_model`: any Hugging Face causal LM of the target's vocabulary drafts by decoding ahead.

It reads nothing of the target's: final tokens go into its own cache, and its own law guesses the
next. A context shorter than the target's ends the drafting of a row, not the row.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from drafters.base import Commit, Features
from drafters.cache import Placement
from drafters.errors import UserError
from drafters.frontier import Frontier, FrontierCells
from drafters.growth import Growth
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
        return ModelSession(self.model, target, growth, rows, capacity)


def _check_vocabulary(model: Target, target: Target) -> None:
    ours, theirs = model.tokenizer, target.tokenizer
    if ours is None or theirs is None:
        sizes = model.shape.vocab_size, target.shape.vocab_size
    else:
        sizes = len(ours), len(theirs)
    if sizes[0] != sizes[1]:
        raise UserError(
            f"draft model {model.name} has a vocabulary of {sizes[0]} ids, target {target.name} "
            f"one of {sizes[1]}: give a model of the target's own tokenizer"
        )
    if ours is None or theirs is None:
        return
    strings = _strings(ours), _strings(theirs)
    for token, (mine, wanted) in enumerate(zip(*strings, strict=True)):
        if mine != wanted:
            raise UserError(
                f"id {token} is {mine!r} for draft model {model.name} and {wanted!r} for target "
                f"{target.name}: give a model of the target's own tokenizer"
            )


def _strings(tokenizer: Any) -> list[str]:
    return tokenizer.convert_ids_to_tokens(range(len(tokenizer)))


class ModelSession(CachedSession):
    """Rows that one causal LM drafts for.

    Args:
        model: the causal LM.
        target: whose rows; only the size of its vocabulary is read.
        growth: the shape of the trees.
        rows: batch size.
        capacity: tokens a row may hold.
    """

    def __init__(
        self, model: Target, target: Target, growth: Growth, rows: int, capacity: int
    ) -> None:
        """Allocate the cache; embeddings padded to another size are cut to the shorter one."""
        # the deepest guess that is fed lies depth - 2 positions behind the last final token
        reach = model.shape.max_positions - growth.depth + 1
        room = max(0, min(capacity, reach))
        super().__init__(Features(), growth, model.new_cache(rows, room + growth.cells), room)
        self.model = model
        wanted = target.shape.vocab_size
        self.size = min(wanted, model.shape.vocab_size)
        self.ids = None if self.size == wanted else torch.arange(self.size, device=model.device)
        self.laws = torch.zeros(rows, self.size, dtype=model.dtype, device=model.device)

    def final(self, commit: Commit) -> Final:
        """Take the new root too; the old one was taken with its own commit."""
        known = commit.inputs if commit.tree is None else commit.inputs[1:]
        return Final(torch.cat((known, torch.tensor([commit.root]))), None)

    def encode(self, final: Final, placement: Placement, ends: Tensor, rows: list[int]) -> None:
        """Run final tokens; keep each row's law of the token after its root."""
        logits, _, _ = self.model.forward(
            final.tokens, placement, self.cache, self.features, wanted=ends
        )
        self.laws[rows] = logits[:, : self.size]

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
        logits, _, _ = session.model.forward(
            frontier.tokens.flatten(), placement, session.cache, session.features
        )
        return logits[:, : session.size].view(*frontier.tokens.shape, -1)

"""The reduced draft vocabulary: which ids a drafter can propose.

Owns the choice by frequency, its coverage, and the buffer that is saved with the weights. A drafter
with K ids has logits [.., K]; index i stands for token ids[i] of the target.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from drafters.errors import UserError


def choose(counts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """Choose the most frequent ids; among equals, unused ones included, the lowest.

    Args:
        counts: [V] int64, how often each id was seen in what the target writes.
        size: how many ids to keep.
        always: ids that are kept whatever their count, such as the ends of a turn.

    Returns:
        [size] int64, ascending, unique.

    Raises:
        UserError: if the size does not hold the required ids or exceeds the vocabulary.

    >>> choose(torch.tensor([0, 5, 0, 9, 7]), 3, always=[2]).tolist()
    [2, 3, 4]
    """
    required = sorted(set(always))
    total = len(counts)
    if not max(1, len(required)) <= size <= total:
        raise UserError(
            f"a draft vocabulary of {size} ids: give {max(1, len(required))} (the ids that must "
            f"be kept) to {total} (the target's vocabulary)"
        )
    if required and not 0 <= required[0] <= required[-1] < total:
        raise UserError(f"required ids {required}: the target's vocabulary is 0 to {total - 1}")
    order = counts.sort(descending=True, stable=True).indices
    needed = torch.zeros(total, dtype=torch.bool)
    needed[required] = True
    rest = order[~needed[order]][: size - len(required)]
    needed[rest] = True
    return needed.nonzero().squeeze(-1)


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Return the share of counted tokens that the ids cover: a ceiling on acceptance.

    >>> coverage(torch.tensor([1, 2, 5]), torch.tensor([1, 2]))
    0.875
    """
    total = int(counts.sum())
    if total == 0:
        raise UserError("no tokens were counted: there is nothing to cover")
    return int(counts[ids].sum()) / total


def place_of(tokens: Tensor, ids: Tensor | None, size: int) -> Tensor:
    """Return the tokens' places [...] among the ids [K] ascending; K where they are not kept.

    Args:
        tokens: [...] int64 of the target's vocabulary.
        ids: the kept ones; None: all, in which case a token is its own place.
        size: K.

    >>> place_of(torch.tensor([4, 5, 9]), torch.tensor([1, 4, 9]), 3).tolist()
    [1, 3, 2]
    """
    if ids is None:
        return tokens
    place = torch.searchsorted(ids, tokens).clamp_max(size - 1)
    return place.where(ids[place] == tokens, size)


class DraftVocabulary(nn.Module):
    """The ids that a drafter's logits stand for, saved with its weights.

    Args:
        size: how many ids are kept; 0 or at least vocab_size: all, and nothing is stored.
        vocab_size: of the target.

    Raises:
        UserError: if the size is negative.
    """

    ids: Tensor | None

    def __init__(self, size: int, vocab_size: int) -> None:
        """Hold the lowest ids until `keep` says better."""
        super().__init__()
        if size < 0:
            raise UserError(f"draft_vocab_size is {size}: give 0 (all ids) or more")
        self.vocab_size = vocab_size
        self.size = 0 if size >= vocab_size else size
        self.register_buffer("ids", torch.arange(self.size) if self.size else None)
        self.register_load_state_dict_post_hook(_check_loaded)

    def __len__(self) -> int:
        """Return the width of the logits."""
        return self.size or self.vocab_size

    def place(self, tokens: Tensor) -> Tensor:
        """Return the tokens' places among the kept ids; their number where they are not kept."""
        return place_of(tokens, self.ids, len(self))

    def keep(self, ids: Tensor) -> None:
        """Set the ids [K] int64; before the drafter's head is started from the target's rows.

        Raises:
            UserError: if they are not K ascending unique ids of the target.
        """
        if self.ids is None:
            raise UserError("this drafter keeps the whole vocabulary: set draft_vocab_size first")
        self._check(ids)
        self.ids.copy_(ids)

    def _check(self, ids: Tensor) -> None:
        if ids.shape != (self.size,):
            raise UserError(f"{len(ids)} draft ids for draft_vocab_size {self.size}")
        ordered = bool((ids[1:] > ids[:-1]).all())
        if not ordered or int(ids[0]) < 0 or int(ids[-1]) >= self.vocab_size:
            raise UserError(
                f"draft ids must be ascending, unique and within 0 to {self.vocab_size - 1}"
            )


def _check_loaded(vocabulary: DraftVocabulary, _incompatible: object) -> None:
    if vocabulary.ids is not None:
        vocabulary._check(vocabulary.ids)

"""Masks: what is added to the scores of an attention, from who sees whom."""

import torch
from torch import Tensor

_ROUND = 64  # new tokens of a row in a round at most: masks of wider chains are not kept


class ChainMasks:
    """Masks of a chain in a single row: views of one mask a width, since only the length differs.

    Args:
        capacity: columns a row can hold.
        device: of the masks.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        """Start without masks."""
        self.capacity, self.device = capacity, device
        self.columns = torch.arange(capacity, device=device)
        self._whole: dict[tuple[int, int | None, int, torch.dtype], Tensor] = {}

    def mask(
        self, width: int, span: int, window: int | None, groups: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Return the additive mask [1, 1, groups * width, span] of the last `width` columns."""
        if window is not None and span <= window:
            window = None
        if width == 1 and window is None:
            return None
        if width > _ROUND:
            return self._build(width, span, window, groups, dtype)
        key = (width, window, groups, dtype)
        if key not in self._whole:
            self._whole[key] = self._build(width, self.capacity, window, groups, dtype)
        return self._whole[key][..., self.capacity - span :]

    def _build(
        self, width: int, span: int, window: int | None, groups: int, dtype: torch.dtype
    ) -> Tensor:
        query = torch.arange(span - width, span, device=self.device)[:, None]
        ahead = torch.arange(span, device=self.device) - query
        hidden = ahead > 0
        if window is not None:
            hidden |= ahead <= -window
        return additive(hidden[None], groups, dtype)


def additive(hidden: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores, [rows, 1, groups * width, span]; hidden [rows, width, span].

    The least finite number, not -inf: a row that sees nothing stays finite.
    """
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    mask.masked_fill_(hidden, torch.finfo(dtype).min)
    return mask.repeat(1, groups, 1)[:, None]

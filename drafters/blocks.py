"""Blocks of a training batch: where they start, and what their slots read.

A block hangs on an anchor, as one does on the root while decoding: its slots see the features of
all earlier tokens of the anchor's document, not the anchor's own, and each other. Many anchors of a
sequence are learned from at once, side by side under one mask.
Source: DFlash (arXiv 2602.06036), training layout.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.alignment import supervised
from drafters.base import Batch
from drafters.packed import Attend


class Blocks:
    """The blocks of one batch.

    A block may hang on an answer's token whose next token is supervised too: any root is such a
    one. If a row has more of them than are wanted, those taken are evenly spread.

    Args:
        batch: whose sequences are learned from.
        most: anchors a row at most.
        length: slots a block.
        vary: whether the choice differs from call to call (torch's generator decides).
    """

    def __init__(self, batch: Batch, most: int, length: int, *, vary: bool) -> None:
        """Choose the anchors and see who sees whom."""
        self.batch, self.length = batch, length
        chosen = spread(batch.label_mask & supervised(batch, 1), most, vary=vary)
        width = max(1, int(chosen.sum(1).max()))  # a batch without any keeps its shape
        order = chosen.byte().argsort(dim=1, descending=True, stable=True)
        self.anchors = order[:, :width]
        self.real = chosen.gather(1, self.anchors)
        self.seen = self._seen()

    def _seen(self) -> Tensor:
        """Return what each slot sees, context first [B, 1, A * S, T + A * S] bool."""
        document, anchors = self.batch.document, self.anchors
        width = anchors.shape[1]
        column = torch.arange(document.shape[1], device=anchors.device)
        earlier = column < anchors[..., None]
        same = document[:, None] == document.gather(1, anchors)[..., None]
        own = torch.eye(width, dtype=torch.bool, device=anchors.device)
        own = own.repeat_interleave(self.length, 0).repeat_interleave(self.length, 1)
        context = (earlier & same).repeat_interleave(self.length, 1)
        return torch.cat((context, own.expand(len(anchors), -1, -1)), -1)[:, None]

    @property
    def positions(self) -> Tensor:
        """Return the slots' positions inside their documents [B, A * S]."""
        first = self.batch.position.gather(1, self.anchors)
        slot = torch.arange(self.length, device=first.device)
        return (first[..., None] + slot).flatten(1)

    def attention(self, keys: Tensor, values: Tensor) -> Attend:
        """Return the attention of one layer over its context keys and values [B, T, Hkv, hd]."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                torch.cat((keys, key), 1).transpose(1, 2),
                torch.cat((values, value), 1).transpose(1, 2),
                attn_mask=self.seen,
                enable_gqa=True,
            )
            return out.transpose(1, 2).flatten(2)

        return attend

    def learned(self, depth: int) -> Tensor:
        """Return which blocks have supervised labels down to a depth [B, A] bool."""
        labels = [supervised(self.batch, ahead) for ahead in range(1, depth + 1)]
        return self.real & torch.stack(labels).all(0).gather(1, self.anchors)


def spread(candidates: Tensor, most: int, *, vary: bool) -> Tensor:
    """Keep at most so many candidates of each row, evenly spread; all if there are no more.

    Args:
        candidates: [B, T] bool.
        most: a row.
        vary: whether the first is a random one, so that all are kept equally often.

    Returns:
        [B, T] bool.

    >>> spread(torch.ones(1, 8, dtype=torch.bool), 4, vary=False).nonzero()[:, 1].tolist()
    [0, 2, 4, 6]
    """
    count = candidates.sum(1, keepdim=True)
    start = torch.zeros_like(count)
    if vary:
        start = (torch.rand(count.shape).to(count.device) * count).long()
    ends = candidates.cumsum(1) * most + start  # of equal shares, `most` of which fill a row
    floor = count.clamp_min(1)
    return candidates & ((ends - 1) // floor != (ends - 1 - most) // floor)

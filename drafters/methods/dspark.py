"""`dspark`: a block of next-token slots, a Markov head and a confidence head.

The anchor's own slot guesses too, so a block of s slots gives s tokens. The Markov head adds a
low-rank bigram to a slot's logits once the token before is known; the confidence head says how
likely the draft is accepted, which growth cost_aware reads. Source: DSpark (DeepSeek, June 2026).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from drafters.block import BlockDrafter, BlockOptions
from drafters.correction import Correction
from drafters.errors import UserError
from drafters.registry import register
from drafters.shape import TargetShape


@dataclass
class DSparkOptions(BlockOptions):
    """Options of `dspark` beyond those of all block drafters.

    Args:
        markov_rank: of the Markov head's matrix over the kept ids; 0: no such head.
        confidence: whether there is a confidence head; train it with `confidence` in loss.mix.
    """

    markov_rank: int = 64
    confidence: bool = True

    def __post_init__(self) -> None:
        """Check the rank."""
        super().__post_init__()
        if self.markov_rank < 0:
            raise UserError(f"markov_rank is {self.markov_rank}: give 0 (no Markov head) or more")


class MarkovCorrection(Correction):
    """Adds a bigram's logits W2 W1[previous] and says how sure it is.

    Args:
        size: kept ids K; tokens that are not kept share one row of W1.
        width: of the slots' states.
        rank: of W2 W1; 0: nothing is added.
        confident: slots that the confidence head serves; 0: there is none.
    """

    def __init__(self, size: int, width: int, rank: int, confident: int) -> None:
        """Add nothing and be half sure at the start."""
        super().__init__(confident)
        self.before = nn.Embedding(size + 1, rank) if rank else None
        self.after = nn.Linear(rank, size, bias=False) if rank else None
        self.sure = nn.Linear(width + rank, 1) if confident else None
        for linear in (self.after, self.sure):
            if linear is not None:
                nn.init.zeros_(linear.weight)
        if self.sure is not None:
            nn.init.zeros_(self.sure.bias)

    def forward(self, unary: Tensor, state: Tensor, previous: Tensor) -> Tensor:
        """Return unary [..., K] plus the logits of the bigrams after `previous` [...]."""
        if self.before is None or self.after is None:
            return unary
        return unary + self.after(self.before(previous))

    def confidence(self, state: Tensor, previous: Tensor) -> Tensor | None:
        """Return w . [state; W1[previous]] + b [...], or None without such a head."""
        if self.sure is None:
            return None
        if self.before is not None:
            embedded = self.before(previous)
            state = torch.cat((state.expand(*embedded.shape[:-1], -1), embedded), -1)
        return self.sure(state)[..., 0].expand(previous.shape)


@register
class DSparkDrafter(BlockDrafter[DSparkOptions]):
    """DSpark for one target.

    Args:
        config: resolved options.
        shape: of the target.
    """

    name: ClassVar[str] = "dspark"
    schema = DSparkOptions
    lead: ClassVar[int] = 0

    def __init__(self, config: DSparkOptions, shape: TargetShape) -> None:
        """Make untrained weights whose Markov head adds nothing yet."""
        super().__init__(config, shape)
        self.correction = MarkovCorrection(
            len(self.vocabulary),
            shape.hidden_size,
            config.markov_rank,
            config.slots if config.confidence else 0,
        )

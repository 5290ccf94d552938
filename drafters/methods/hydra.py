"""`hydra`: heads on the target's last state, each reading the tokens guessed before its own.

Head k (from 0) at index i reads the state of token i and the embeddings of tokens i + 1 to
i + k + 1: the root and what was drafted below it. So it guesses token i + k + 2 for one path of a
tree, not for a depth. Embeddings are the target's.
Source: Ankner et al. 2024 (Hydra, arXiv 2402.05109).
"""

from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.alignment import supervised
from drafters.base import Batch, Prediction
from drafters.frontier import Frontier
from drafters.growth import Growth
from drafters.heads import HeadsDrafter, HeadsOptions, HeadsSession, ResidualBlock
from drafters.registry import register
from drafters.shape import TargetShape
from drafters.target import Target


class MixingBlock(nn.Module):
    """R x + SiLU(W x + b) of a state followed by embeddings; the state itself at the start.

    Args:
        width: of the state and of each embedding.
        tokens: embeddings that are read.
    """

    def __init__(self, width: int, tokens: int) -> None:
        """Let the state through."""
        super().__init__()
        self.linear = nn.Linear((tokens + 1) * width, 2 * width)  # R above W
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.linear.weight.data[width:] = 0

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., (tokens + 1) * D] to [..., D]."""
        return mixed(self.linear(x))


def mixed(both: Tensor) -> Tensor:
    """Return [..., D] of a mixing block's two halves [..., 2 D]."""
    reduced, gate = both.chunk(2, -1)
    return reduced + F.silu(gate)


@register
class HydraDrafter(HeadsDrafter):
    """Hydra heads for one target.

    Args:
        config: resolved options.
        shape: of the target.
    """

    name: ClassVar[str] = "hydra"

    def __init__(self, config: HeadsOptions, shape: TargetShape) -> None:
        """Make heads that let the state through."""
        width = shape.hidden_size
        rest = config.blocks - 1
        blocks = [
            [MixingBlock(width, head + 1), *(ResidualBlock(width) for _ in range(rest))]
            for head in range(config.heads)
        ]
        super().__init__(config, shape, blocks)

    def predict(self, batch: Batch, target: Target) -> list[Prediction]:
        """Let head k at index i predict position i + k + 1 from the true tokens in between."""
        last = batch.last.flatten(0, 1).to(self.linears()[0].weight.dtype)
        ids = batch.ids.flatten()
        predictions = []
        for head in range(self.config.heads):
            group = supervised(batch, head + 2).flatten().nonzero()[:, 0]
            tokens = ids[group[:, None] + torch.arange(1, head + 2, device=group.device)]
            logits = partial(self._logits, head, last[group], tokens, target)
            predictions.append(Prediction(group + head + 1, head + 1, group, logits))
        return predictions

    def _logits(
        self, head: int, last: Tensor, tokens: Tensor, target: Target, span: slice
    ) -> Tensor:
        embedded = target.embed(tokens[span]).to(last.dtype)
        return self.logits(head, torch.cat((last[span], embedded.flatten(1)), 1))

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "HydraSession":
        """Start a decoding session on a frozen copy of the weights.

        Raises:
            UserError: if the growth asks for more levels than there are heads.
        """
        return HydraSession(self, target, growth, rows)


class HydraSession(HeadsSession):
    """Rows whose heads run one after the other."""

    def __init__(self, drafter: HydraDrafter, target: Target, growth: Growth, rows: int) -> None:
        """Pack the heads that the growth asks for."""
        super().__init__(drafter, target, growth, rows)
        self.embed = target.embed
        self.heads = [drafter.packed(head, target.dtype) for head in range(growth.depth)]

    def guesser(self, rows: list[int]) -> "HydraGuesser":
        """Start a round for these rows."""
        return HydraGuesser(self, rows)

    def logits(self, head: int, read: Tensor) -> Tensor:
        """Return head `head`'s logits [m, K] of what it reads [m, (head + 2) * D]."""
        mix, *blocks = self.heads[head]
        state = mixed(mix(read))
        for block in blocks:
            state = state + F.silu(block(state))
        return self.output(head)(state)


class HydraGuesser:
    """One round: every node keeps what its head read, the state and its path's embeddings."""

    def __init__(self, session: HydraSession, rows: list[int]) -> None:
        """Start at the roots."""
        self.session, self.ids = session, session.ids
        last = session.last[rows]
        roots = torch.tensor([session.roots[row] for row in rows], device=last.device)
        self.read = torch.cat((last, session.embed(roots)), -1)[:, None]

    def root_logits(self) -> Tensor:
        """Return the first head's logits [R, K]."""
        return self.session.logits(0, self.read[:, 0])

    def step(self, frontier: Frontier) -> Tensor:
        """Return the logits [R, F, K] of the token after each node."""
        tokens = frontier.tokens.to(self.read.device)
        parent = frontier.parent[..., None].expand(-1, -1, self.read.shape[-1])
        self.read = torch.cat((self.read.gather(1, parent), self.session.embed(tokens)), -1)
        logits = self.session.logits(frontier.depth, self.read.flatten(0, 1))
        return logits.view(*tokens.shape, -1)

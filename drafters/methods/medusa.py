"""`medusa`: heads on the target's last state, each guessing one further token on its own.

Head k (from 0) at index i guesses token i + k + 2; the target's own head has token i + 1. One
residual SiLU block a head starts at zero, so every head starts as the target's own head on the kept
ids. By default one output matrix serves all heads: at 8192 ids of width 576 it is read once a round
(0.8 ms measured on a 2-core machine, a private one a head four times that), and every head's tokens
train it. Source: Cai et al. 2024 (Medusa-1, arXiv 2401.10774).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.alignment import supervised
from drafters.base import Batch, Commit, Features, Prediction
from drafters.errors import UserError
from drafters.growth import Growth
from drafters.layers import packed_linear
from drafters.parallel import ParallelGuesser, check_levels
from drafters.reduced import ReducedDrafter
from drafters.registry import register
from drafters.sampling import RowRandom, Warp
from drafters.session import by_row
from drafters.shape import TargetShape
from drafters.target import Target
from drafters.tree import TokenTree


@dataclass
class MedusaOptions:
    """Options of `medusa`.

    Args:
        heads: how many tokens beyond the next one are guessed.
        blocks: residual blocks of each head.
        draft_vocab_size: ids that the heads keep at most; 0: all.
        shared_head: whether one output matrix serves all heads.
    """

    heads: int = 4
    blocks: int = 1
    draft_vocab_size: int = 8192
    shared_head: bool = True

    def __post_init__(self) -> None:
        """Check the counts."""
        if self.heads < 1 or self.blocks < 1:
            raise UserError(f"heads is {self.heads}, blocks {self.blocks}: give 1 or more")


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), the identity at the start."""

    def __init__(self, width: int) -> None:
        """Make zero weights."""
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        return x + F.silu(self.linear(x))


@register
class MedusaDrafter(ReducedDrafter[MedusaOptions]):
    """Medusa heads for one target.

    Args:
        config: resolved options.
        shape: of the target.
    """

    name: ClassVar[str] = "medusa"
    schema = MedusaOptions
    features = Features(last=True)

    def __init__(self, config: MedusaOptions, shape: TargetShape) -> None:
        """Make heads whose blocks do nothing yet."""
        super().__init__(config, shape)
        width = shape.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width) for _ in range(config.blocks)))
            for _ in range(config.heads)
        )
        outputs = 1 if config.shared_head else config.heads
        size = len(self.vocabulary)
        self.outputs = nn.ModuleList(nn.Linear(width, size, bias=False) for _ in range(outputs))

    @torch.no_grad()
    def init_from(self, target: Target) -> None:
        """Start every output matrix as the target's rows of the kept ids."""
        rows = self.head_rows(target)
        for output in self.linears():
            output.weight.copy_(rows)

    def linears(self) -> list[nn.Linear]:
        """Return the output matrices: one, or one a head."""
        return cast("list[nn.Linear]", list(self.outputs))

    def blocks(self, head: int) -> list[ResidualBlock]:
        """Return the residual blocks of one head."""
        return cast("list[ResidualBlock]", list(cast("nn.Sequential", self.heads[head])))

    def logits(self, head: int, last: Tensor) -> Tensor:
        """Return head `head`'s logits [..., K] of post-norm states [..., D]."""
        return self.outputs[head % len(self.outputs)](self.heads[head](last))

    def predict(self, batch: Batch, target: Target) -> list[Prediction]:
        """Let head k at index i predict position i + k + 1, where a label is supervised."""
        last = batch.last.flatten(0, 1).to(self.linears()[0].weight.dtype)
        predictions = []
        for head in range(self.config.heads):
            group = supervised(batch, head + 2).flatten().nonzero()[:, 0]
            logits = partial(self._logits, head, last[group])
            predictions.append(Prediction(group + head + 1, head + 1, group, logits))
        return predictions

    def _logits(self, head: int, last: Tensor, span: slice) -> Tensor:
        return self.logits(head, last[span])

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "MedusaSession":
        """Start a decoding session on a frozen copy of the weights.

        Raises:
            UserError: if the growth asks for more levels than there are heads.
        """
        check_levels(growth, self.config.heads, "heads")
        return MedusaSession(self, target, growth, rows)


class MedusaSession:
    """Each row's last state, all that its heads read."""

    def __init__(self, drafter: MedusaDrafter, target: Target, growth: Growth, rows: int) -> None:
        """Pack the weights of the heads that the growth asks for."""
        self.features, self.growth = drafter.features, growth
        self.ids = None if drafter.ids is None else drafter.ids.to(target.device)
        dtype = target.dtype
        self.blocks = [
            [packed_linear(block.linear, dtype) for block in drafter.blocks(head)]
            for head in range(growth.depth)
        ]
        self.outputs = [packed_linear(output, dtype) for output in drafter.linears()]
        self.roots = [0] * rows
        self.last = torch.zeros(rows, drafter.shape.hidden_size, dtype=dtype, device=target.device)

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Keep the state of each row's last token before its root."""
        for row, commit in enumerate(commits):
            if commit is not None:
                assert commit.last is not None
                self.roots[row] = commit.root
                self.last[row] = commit.last[-1]

    @torch.inference_mode()
    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        """Run all heads once and grow trees from their laws."""
        coins = {row: x.draft for row, x in enumerate(random) if x is not None}
        rows = list(coins)
        roots = [self.roots[row] for row in rows]
        guesser = warp.guide(ParallelGuesser(self.logits(self.last[rows]), self.ids), rows)
        trees = self.growth.grow(roots, guesser, warp, list(coins.values()))
        return by_row(dict(zip(rows, trees, strict=True)), self.roots, random)

    def logits(self, last: Tensor) -> Tensor:
        """Return all heads' logits [heads, R, K] of states [R, D]."""
        states = []
        for blocks in self.blocks:
            state = last
            for block in blocks:
                state = state + F.silu(block(state))
            states.append(state)
        if len(self.outputs) == 1:
            return self.outputs[0](torch.stack(states))
        return torch.stack([self.outputs[k](state) for k, state in enumerate(states)])

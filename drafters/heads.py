"""Heads on the target's last state: what drafters have in common that guess a token a head.

Head k (from 0) at index i guesses token i + k + 2; the target's own head has token i + 1. What a
head reads is its family's: between that and an output matrix lie residual blocks that do nothing at
the start, so that every head starts as the target's own on the kept ids. By default one output
matrix serves all heads: every head's tokens train it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.base import Commit, Features
from drafters.errors import UserError
from drafters.growth import Growth, Guesser
from drafters.layers import packed_linear
from drafters.linear import FrozenLinear
from drafters.parallel import check_levels
from drafters.reduced import ReducedDrafter
from drafters.sampling import RowRandom, Warp
from drafters.session import by_row
from drafters.shape import TargetShape
from drafters.target import Target
from drafters.tree import TokenTree


@dataclass
class HeadsOptions:
    """Options of a family of heads.

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


class HeadsDrafter(ReducedDrafter[HeadsOptions]):
    """Output matrices, and `heads`: what lies between a head's reading and its output.

    Args:
        config: resolved options.
        shape: of the target.
        heads: blocks of every head, each around one map `linear`; the last gives [..., D].
    """

    schema = HeadsOptions
    features = Features(last=True)

    def __init__(
        self, config: HeadsOptions, shape: TargetShape, heads: Sequence[Sequence[nn.Module]]
    ) -> None:
        """Make untrained outputs."""
        super().__init__(config, shape)
        self.heads = nn.ModuleList(nn.Sequential(*blocks) for blocks in heads)
        count, size = 1 if config.shared_head else config.heads, len(self.vocabulary)
        self.outputs = nn.ModuleList(
            nn.Linear(shape.hidden_size, size, bias=False) for _ in range(count)
        )

    @torch.no_grad()
    def init_from(self, target: Target) -> None:
        """Start every output matrix as the target's rows of the kept ids."""
        rows = self.head_rows(target)
        for output in self.linears():
            output.weight.copy_(rows)

    def linears(self) -> list[nn.Linear]:
        """Return the output matrices: one, or one a head."""
        return cast("list[nn.Linear]", list(self.outputs))

    def packed(self, head: int, dtype: torch.dtype) -> list[FrozenLinear]:
        """Return copies of the maps of one head's blocks."""
        blocks = cast("list[ResidualBlock]", list(cast("nn.Sequential", self.heads[head])))
        return [packed_linear(block.linear, dtype) for block in blocks]

    def logits(self, head: int, read: Tensor) -> Tensor:
        """Return head `head`'s logits [..., K] of what it reads [..., width]."""
        return self.outputs[head % len(self.outputs)](self.heads[head](read))


class HeadsSession(ABC):
    """Each row's last state, all of the target's that its heads read.

    Args:
        drafter: its weights are copied; later training does not reach the session.
        target: gives dtype and device.
        growth: the shape of the trees.
        rows: batch size.

    Raises:
        UserError: if the growth asks for more levels than there are heads.
    """

    def __init__(self, drafter: HeadsDrafter, target: Target, growth: Growth, rows: int) -> None:
        """Pack the outputs."""
        check_levels(growth, drafter.config.heads, "heads")
        self.features, self.growth = drafter.features, growth
        self.ids = None if drafter.ids is None else drafter.ids.to(target.device)
        self.outputs = [packed_linear(output, target.dtype) for output in drafter.linears()]
        self.roots = [0] * rows
        width = drafter.shape.hidden_size
        self.last = torch.zeros(rows, width, dtype=target.dtype, device=target.device)

    @abstractmethod
    def guesser(self, rows: list[int]) -> Guesser:
        """Return what a growth policy asks in a round of these rows."""

    def output(self, head: int) -> FrozenLinear:
        """Return the output matrix of a head."""
        return self.outputs[head % len(self.outputs)]

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Keep the state of each row's last token before its root."""
        for row, commit in enumerate(commits):
            if commit is not None:
                assert commit.last is not None
                self.roots[row] = commit.root
                self.last[row] = commit.last[-1]

    @torch.inference_mode()
    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        """Grow a tree a row from what its heads guess."""
        coins = {row: x.draft for row, x in enumerate(random) if x is not None}
        rows = list(coins)
        roots = [self.roots[row] for row in rows]
        guesser = warp.guide(self.guesser(rows), rows)
        trees = self.growth.grow(roots, guesser, warp, list(coins.values()))
        return by_row(dict(zip(rows, trees, strict=True)), self.roots, random)

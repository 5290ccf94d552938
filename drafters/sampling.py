"""Warp: from logits to the law that is served; and each row's own randomness.

One place warps, for target and drafter alike, so that p and q mean the same thing everywhere.
Order of the steps as in Hugging Face's generate: rules (rules.py), temperature, top-k, top-p,
min-p.
"""

# torch leaves tolist untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.errors import UserError
from drafters.laws import Law, Laws

if TYPE_CHECKING:
    from drafters.growth import Guesser
    from drafters.rules import Rules

_BLOCK = 256  # weights added up before their running sum is taken
_LARGEST_SEED = 2**40
_COLDEST = 1e-30  # logits divided by less may overflow
_COINS = 2  # streams a row owns: drafting noise and judging noise are never shared


@dataclass(frozen=True)
class Warp:
    """How logits become a law.

    Args:
        temperature: 0 is greedy: the law is a point mass on the argmax (lowest id on a tie).
        top_k: keep the k most likely tokens; 0 keeps all. Ties of the k-th are kept, as HF does.
        top_p: keep the smallest set of tokens whose mass reaches top_p; 1 keeps all.
        min_p: drop tokens below min_p times the most likely one's probability; 0 drops none.
        rules: what a context does to the logits before that; None: nothing.

    Raises:
        UserError: if a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    rules: "Rules | None" = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        numbers = {"temperature": Real, "top_k": Integral, "top_p": Real, "min_p": Real}
        for name, kind in numbers.items():
            if not isinstance(getattr(self, name), kind):
                whole = "a whole" if kind is Integral else "a"
                raise UserError(f"{name} is {getattr(self, name)!r}: give {whole} number")
        check_temperature("temperature", self.temperature)
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: give 0 (off) or a whole number above it")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: give a value in (0, 1]; 1 is off")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p}: give a value in [0, 1]; 0 is off")

    @property
    def greedy(self) -> bool:
        """Tell whether every law is a point mass."""
        return self.temperature == 0

    def guide(self, guesser: "Guesser", rows: Sequence[int]) -> "Guesser":
        """Return the guesser of these rows as the rules want it: here as it is, see rules.py."""
        return guesser

    def laws(self, logits: Tensor, ids: Tensor | None = None) -> Laws:
        """Turn logits into laws.

        Args:
            logits: [M, K] any float dtype, ruled if there are rules; computed in float32. More
                axes may lie between.
            ids: [K] shared ids when the logits cover a reduced vocabulary.

        Returns:
            Laws with M rows; sparse [M, 1] and in the CPU's memory when greedy. A law of logits
            whose largest is not finite (NaN, infinity) is NaN throughout.
        """
        of = torch.arange(len(logits))
        if self.greedy:
            # max is faster than argmax, in bfloat16 three times; a NaN is the largest of its row
            largest, best = logits.max(-1, keepdim=True)
            sure = torch.where(largest.isfinite(), 1.0, torch.nan).cpu()
            return Laws(sure, (best if ids is None else ids[best]).cpu(), of)
        scores = logits.float() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            kth = scores.topk(self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < kth, -torch.inf)
        if self.top_p < 1:
            scores = _top_p(scores, self.top_p)
        probs = scores.softmax(-1)
        if self.min_p > 0:
            probs = probs * (probs >= self.min_p * probs.amax(-1, keepdim=True))
            probs = probs / probs.sum(-1, keepdim=True)
        return Laws(probs, ids, of)


def _top_p(scores: Tensor, top_p: float) -> Tensor:
    ordered, order = scores.sort(stable=True)
    below = ordered.softmax(-1).cumsum(-1)
    drop = below <= 1 - top_p
    drop[..., -1] = False
    return scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)


class Coin:
    """Randomness of one row and one purpose: the coin that verifiers and drafters toss."""

    def __init__(self, seed: int) -> None:
        """Seed an own generator; the global one is never touched."""
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """Draw uniform float32 numbers in [0, 1)."""
        return torch.rand(shape, generator=self.generator)

    def accept(self, probability: float | Tensor) -> bool:
        """Return True with this probability; 0 never, 1 always."""
        return bool(self.uniform(()) < probability)

    def draw(self, law: Law) -> int:
        """Draw a token from a law whose weights need not be normalised."""
        if len(law.weights) == 1 and law.ids is not None:
            return int(law.ids[0])
        index = _place(law.weights, self.uniform(()).double())
        return index if law.ids is None else int(law.ids[index])

    def draw_distinct(self, probs: Tensor, count: int) -> Tensor:
        """Draw distinct tokens from each law, in drawn order (exponential race = Gumbel top-k).

        Args:
            probs: [F, K] laws.
            count: how many to draw from each.

        Returns:
            [F, count] int64 indices into K. Where a law has fewer than `count` tokens of positive
            probability, the surplus draws have none: the caller drops them.
        """
        arrival = -torch.log1p(-self.uniform(probs.shape)).to(probs.device)
        return (probs / arrival.clamp_min(torch.finfo(arrival.dtype).tiny)).topk(count).indices


def _place(weights: Tensor, share: Tensor) -> int:
    """Return the first place where the running sum of [K] weights exceeds this share of it all.

    In two steps, blocks first: a running sum over a whole vocabulary takes ten times as long.
    """
    blocks = F.pad(weights, (0, -len(weights) % _BLOCK)).view(-1, _BLOCK)
    ends = blocks.sum(1).double().cumsum(0)
    point = share * ends[-1]
    block = int(torch.searchsorted(ends, point, right=True))
    if block:
        point = point - ends[block - 1]
    inner = blocks[block].double().cumsum(0)
    index = int(torch.searchsorted(inner, point, right=True))
    if index == _BLOCK:  # the two sums round differently: take the block's last weight
        index = int(blocks[block].nonzero()[-1])
    return block * _BLOCK + index


def check_temperature(name: str, value: float, *, greedy: bool = True) -> None:
    """Refuse what no law can be tempered by.

    Args:
        name: of what is checked, for the error.
        value: a temperature.
        greedy: whether 0, the argmax, is one.

    Raises:
        UserError: says which are allowed.
    """
    if not ((greedy and value == 0) or _COLDEST <= value < math.inf):
        zero = "0 (greedy), or " if greedy else ""
        raise UserError(f"{name} is {value}: give {zero}{_COLDEST} or more")


def check_seed(seed: object) -> None:
    """Refuse a seed that the generators, multiplied by rows, cannot hold.

    Raises:
        UserError: says which fit.
    """
    if not isinstance(seed, int) or abs(seed) > _LARGEST_SEED:
        raise UserError(
            f"seed is {seed!r}: give a whole number from {-_LARGEST_SEED} to {_LARGEST_SEED}"
        )


class RowRandom:
    """The two independent coins of one row: `draft` for proposing, `verify` for judging.

    A row's output depends on its own seed alone, never on its neighbours or on other generators.
    """

    def __init__(self, seed: int, row: int = 0) -> None:
        """Derive both seeds from the user's seed and the row's number."""
        words = torch.Generator().manual_seed(seed * 1_000_003 + row * _COINS + 17)
        first, second = torch.randint(2**62, (2,), generator=words).tolist()
        self.draft = Coin(first)
        self.verify = Coin(second)

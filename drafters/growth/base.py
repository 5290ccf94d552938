"""What growth policies and sessions ask of each other, and what every policy checks.

All drafting rows grow in lockstep; what differs is their tokens. Whether a drawn token is submitted
never depends on that token (non-anticipation): policies that choose nodes by their own score
therefore take point masses only.
"""

from collections.abc import Sequence
from typing import Protocol, Self, runtime_checkable

from torch import Tensor

from drafters.base import Commit
from drafters.errors import UserError
from drafters.frontier import Frontier
from drafters.laws import Laws
from drafters.sampling import Coin, Warp
from drafters.tree import TokenTree

DRAFT_MODES = ("argmax", "sampled")
MOST_NODES = 1024  # of a tree; masks grow with the square of their number


class Guesser(Protocol):
    """What a session shows to a growth policy for the rows that draft in this round."""

    @property
    def ids(self) -> Tensor | None:
        """Return the draft vocabulary [K], None for the target's own."""
        ...

    def root_logits(self) -> Tensor:
        """Return the drafter's logits [R, K] of the token after each root."""
        ...

    def step(self, frontier: Frontier) -> Tensor:
        """Return logits [R, F, K] of the token after each frontier node."""
        ...


@runtime_checkable
class Confident(Protocol):
    """A guesser that may know better than its laws how likely its drafts are accepted."""

    def confidence(self) -> Tensor | None:
        """Return chances [R, F] for the nodes asked for last; None: the laws are all it knows."""
        ...


@runtime_checkable
class Growth(Protocol):
    """A growth policy: `depth` levels and at most `nodes` drafted nodes.

    `start` gives what one decoder's rows are grown by: a policy that learns from what is accepted
    keeps its counts there. A decoder then asks `levels` before and tells `observe` after a round.
    """

    @property
    def depth(self) -> int:
        """Return the number of levels below the root."""
        ...

    @property
    def draft(self) -> str:
        """Return how tokens are chosen: argmax or sampled."""
        ...

    @property
    def nodes(self) -> int:
        """Return the largest number of drafted nodes."""
        ...

    @property
    def cells(self) -> int:
        """Return the largest number of nodes that a drafter's cache holds beyond the prefix."""
        ...

    @property
    def expanded(self) -> int:
        """Return the largest number of nodes that are expanded a level."""
        ...

    @property
    def levels(self) -> int:
        """Return how many levels the coming round may have; 0: drafting does not pay now."""
        ...

    def start(self, rows: int) -> "Growth":
        """Return the policy of one decoder of so many rows, without any history."""
        ...

    def member(self, index: int, rows: int) -> "Growth":
        """Return what member `index` of a joint drafter grows its own trees by, as `start` does."""
        ...

    def budget(self, survivals: Sequence[float]) -> int:
        """Return how many nodes of one row are worth being verified.

        Args:
            survivals: of the nodes, descending.
        """
        ...

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Learn from what became final in a round, prefill included; one entry a row."""
        ...

    def grow(
        self, roots: Sequence[int], guesser: Guesser, warp: Warp, coins: Sequence[Coin]
    ) -> list[TokenTree]:
        """Grow one tree a row below the given roots."""
        ...


class FixedShape:
    """A policy that learns nothing."""

    def start(self, rows: int) -> Self:
        """Return itself."""
        return self

    def member(self, index: int, rows: int) -> Self:
        """Return itself."""
        return self

    def budget(self, survivals: Sequence[float]) -> int:
        """Return that all are."""
        return len(survivals)

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Learn nothing."""


def target_ids(choice: Tensor, ids: Tensor | None) -> Tensor:
    """Return chosen places of a draft vocabulary as the target's ids."""
    return choice if ids is None else ids[choice]


def check_draft(draft: str, allowed: Sequence[str], growth: str) -> None:
    """Raise UserError if a draft mode is not among those that a policy has."""
    if draft not in allowed:
        raise UserError(f"draft is {draft!r} with growth {growth}: give {' or '.join(allowed)}")


def check_at_least(value: object, least: int, name: str) -> None:
    """Raise UserError if a value is no whole number or too small."""
    if not isinstance(value, int) or value < least:
        raise UserError(f"{name} is {value!r}: give a whole number of {least} or more")


def check_size(value: object, name: str) -> None:
    """Raise UserError if a value is no whole number that a tree may have."""
    if not isinstance(value, int) or not 1 <= value <= MOST_NODES:
        raise UserError(f"{name} is {value!r}: give a whole number from 1 to {MOST_NODES}")


def drawable(warp: Warp, logits: Tensor, ids: Tensor | None = None) -> Laws:
    """Return the laws to draw drafts from, uniform where the drafter's states overflowed.

    Any law will do as long as it is the one that was drawn from; a NaN is none.
    """
    laws = warp.laws(logits, ids)
    broken = laws.broken
    if bool(broken.any()):
        laws.probs[broken] = 1 / laws.probs.shape[-1]
    return laws

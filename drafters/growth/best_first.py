"""Best first: the most probable nodes of all, whatever their depth."""

from collections.abc import Sequence
from dataclasses import dataclass

from drafters.growth.base import FixedShape, Guesser, check_draft, check_size
from drafters.growth.dynamic import grow_best
from drafters.sampling import Coin, Warp
from drafters.tree import TokenTree


@dataclass(frozen=True)
class BestFirst(FixedShape):
    """DDTree's growth: the `nodes` prefixes that the drafter finds most probable.

    They maximise the expected number of accepted drafts if the target followed the drafter's laws.
    A heap that pops one node after the other finds them; so does a sweep over the levels that goes
    on below every node more probable than the worst of the best so far, and it asks the drafter
    once a level. Under marginals (parallel drafters) no node costs a forward; a drafter that runs
    its frontier may be asked for up to `nodes` nodes a level.
    Source: DDTree (arXiv 2604.12989); with a correction by the token before, over conditionals.
    """

    nodes: int = 16
    depth: int = 4
    draft: str = "argmax"

    def __post_init__(self) -> None:
        """Check the values."""
        check_size(self.nodes, "nodes")
        check_size(self.depth, "depth")
        check_draft(self.draft, ("argmax",), "best_first")

    @property
    def expanded(self) -> int:
        """Return the nodes: all may lie on one level."""
        return self.nodes

    @property
    def levels(self) -> int:
        """Return the depth: every round is worth drafting for."""
        return self.depth

    @property
    def cells(self) -> int:
        """Return the nodes that are expanded at most."""
        return self.nodes * (self.depth - 1)

    def grow(
        self, roots: Sequence[int], guesser: Guesser, warp: Warp, coins: Sequence[Coin]
    ) -> list[TokenTree]:
        """Grow one tree a row."""
        return grow_best(roots, guesser, nodes=self.nodes, width=self.nodes, depth=self.depth)

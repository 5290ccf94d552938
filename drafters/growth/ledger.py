"""Ledger: what drafting earns on these rows lately, against what it costs.

The unit of time is a round of plain decoding. `rate` is what is earned at present: emitted tokens a
row in one unit; plain decoding earns 1. Whatever is added to a round must bring more tokens than
its time earns otherwise (the marginal rule: survival > rate * cost), so the same inequality
decides over a node, a level, and drafting at all.
"""

# torch leaves tolist untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from collections.abc import Sequence

from drafters.base import Commit
from drafters.growth.prices import Prices
from drafters.growth.recent import KEEP, Recent, bin_of
from drafters.tree import TokenTree

_GUESS = 0.5  # acceptance of a level before anything was judged
_WAKE = 0.03  # tokens a round that drafting must promise before it comes back
_SHORTEST, _LONGEST = 16, 256  # plain rounds between two trials


class Ledger:
    """Counts of one decoder's rows, and the decisions that follow.

    All of it is known before the round begins: no decision looks at a token of the coming tree.

    Args:
        prices: measured costs.
        depth: levels at most.
    """

    _gap: int  # plain rounds between two trials, while asleep
    _wait: int  # and how many of them are left

    def __init__(self, prices: Prices, depth: int) -> None:
        """Start with guesses."""
        self.prices, self.depth = prices, depth
        self._levels = range(1, depth + 1)
        self._accepted = Recent()  # by level: whether a level was accepted where it was judged
        self._sizes = Recent()  # by level: nodes a row where it was drafted
        self._chances = Recent()  # by (level, bin of confidence), level 0: all of them
        self._tokens = self._time = self.rate = 1.0
        self.asleep = False
        best = (n - prices.drafting(n) - prices.tokens(1 + n) + 1 for n in self._levels)
        self._hope = max(best) > _WAKE  # whether a drafter that is always right would pay
        self._settle()

    def _earn(self, tokens: float, time: float) -> None:
        self._tokens = KEEP * self._tokens + tokens
        self._time = KEEP * self._time + time
        self.rate = max(1.0, self._tokens / self._time)

    def _settle(self) -> None:
        """Work out what holds until the next round is observed."""
        self._alpha: list[float] = []  # by level, from 1
        for level in self._levels:
            above = self._alpha[-1] if self._alpha else _GUESS
            self._alpha.append(self._accepted.mean(level, above))
        self._size = [self._sizes.mean(level, 1.0) for level in self._levels]
        self._plan = self.promise()

    @property
    def levels(self) -> int:
        """Return the levels of the coming round: none while asleep, one in a trial."""
        if self.asleep:
            return int(self._wait <= 0)
        return self._plan[1]

    def chance(self, level: int, confidence: float) -> float:
        """Return how likely a node is accepted if its parent is.

        Args:
            level: of the node, from 1.
            confidence: what the drafter's law says, in [0, 1]; taken at its word until judged.
        """
        place = bin_of(confidence)
        everywhere = self._chances.mean((0, place), confidence)
        return self._chances.mean((level, place), everywhere)

    def promise(
        self, survival: float = 1.0, above: int = 0, nodes: float = 0.0
    ) -> tuple[float, int]:
        """Return what further levels earn beyond their time at best, and down to which level.

        Args:
            survival: how likely the accepted path reaches level `above`.
            above: the last level that was drafted; 0: nothing was.
            nodes: drafted a row so far.

        Returns:
            Tokens a row, negative if no further level pays; and the deepest level to draft.
        """
        best, earned = (-math.inf, above), 0.0
        spent = -self.prices.tokens(1 + nodes)
        for level in self._levels[above:]:
            survival *= self._alpha[level - 1]
            nodes += self._size[level - 1]
            earned += survival
            spent += self.prices.first if level == 1 else self.prices.level
            total = earned - self.rate * (spent + self.prices.tokens(1 + nodes))
            if total > best[0]:
                best = total, level
        return best

    def worth(self, survivals: Sequence[float], rows: int) -> int:
        """Return how many nodes pay for being verified, best first.

        Args:
            survivals: of all rows' nodes, descending.
            rows: how many draft.
        """
        best, earned, count = 0.0, 0.0, 0
        for number, survival in enumerate(survivals, start=1):
            earned += survival / rows
            gain = earned - self.rate * (self.prices.tokens(1 + number / rows) - 1)
            if gain > best:
                best, count = gain, number
        return count

    def pays(self, survival: float, level: int, nodes: float, rows: int) -> bool:
        """Tell whether one more node of a chain pays, with the levels that it makes possible.

        Args:
            survival: of the node.
            level: of the node.
            nodes: drafted a row so far, in the mean.
            rows: how many draft.
        """
        after = nodes + 1 / rows
        cost = rows * (self.prices.tokens(1 + after) - self.prices.tokens(1 + nodes))
        further = max(0.0, self.promise(survival, level, after)[0])
        return survival + further > self.rate * cost

    def observe(self, commits: Sequence[Commit], levels: int, reaches: Sequence[int]) -> None:
        """Take in one round.

        Args:
            commits: of the rows that were judged, at least one.
            levels: that the round was allowed.
            reaches: levels that were drafted for each row, whether nodes of them were kept or not.
        """
        if levels == 0:
            self._earn(1.0, 1.0)
            self._wait -= 1
            return
        rows = len(commits)
        judged = [self._judge(*one, rows) for one in zip(commits, reaches, strict=True)]
        nodes = sum(commit.tree.drafted for commit in commits if commit.tree is not None) / rows
        time = self.prices.tokens(1 + nodes) + self.prices.drafting(max(reaches))
        tokens = sum(len(c.emitted) for c in commits) / rows
        self._earn(tokens, time)
        self._settle()
        if any(judged):  # a drafter that had nothing to say cost nothing and taught nothing
            self._rest(tokens > time)

    def _judge(self, commit: Commit, reach: int, rows: int) -> int:
        """Count the levels and nodes of one of so many rows; return how many levels were judged."""
        tree = commit.tree
        assert tree is not None
        judged = commit.attempted if commit.finished else min(reach, commit.accepted + 1)
        for level in self._levels[:judged]:
            self._accepted.add(level, float(level <= commit.accepted), rows)
        depths = tree.depth.tolist()
        for level in self._levels[:reach]:
            self._sizes.add(level, depths.count(level), rows)
        if tree.confidence is not None:
            self._count_nodes(commit, tree, tree.confidence.tolist(), depths, rows)
        return judged

    def _count_nodes(
        self,
        commit: Commit,
        tree: TokenTree,
        confidence: list[float],
        depths: list[int],
        rows: int,
    ) -> None:
        followed = [*(tree.token_list[node] for node in commit.path[1:]), commit.root]
        for node, token in zip(commit.path, followed, strict=True):
            for child in tree.children[node]:
                place = bin_of(math.exp(confidence[child] - confidence[node]))
                taken = float(tree.token_list[child] == token)
                self._chances.add((0, place), taken, rows)
                self._chances.add((depths[child], place), taken, rows)

    def _rest(self, paid: bool) -> None:
        """Fall asleep where nothing pays; come back once it does by a margin."""
        gain = self._plan[0]
        if not self.asleep:
            self.asleep = gain < 0
            self._gap = self._wait = _SHORTEST
        elif gain > _WAKE:
            self.asleep = False
        elif paid and self._hope:  # again at once: a run of luck, or the text became easy
            self._wait = 0
        else:
            self._gap = self._wait = min(2 * self._gap, _LONGEST)

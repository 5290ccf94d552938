"""`ngram`: prompt lookup. What followed the same last tokens before is proposed again.

An index from n-grams to the position after their latest occurrence grows with every committed
token, so a proposal costs a look-up and never a scan. Proposals are point masses. Source: Saxena
2023 (prompt lookup decoding); Yang et al. 2023 (LLMA).
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from drafters.base import Commit, Features
from drafters.errors import UserError
from drafters.growth import Growth
from drafters.options import checked
from drafters.registry import register
from drafters.sampling import RowRandom, Warp
from drafters.shape import TargetShape
from drafters.target import Target
from drafters.tree import TokenTree


@register
class NgramDrafter:
    """Prompt lookup.

    Args:
        longest, shortest: lengths of the n-grams looked up, the longest first.

    Raises:
        UserError: if the lengths are out of order or below 1.
    """

    name: ClassVar[str] = "ngram"
    features = Features()

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        """Check and keep the lengths."""
        if not 1 <= shortest <= longest:
            raise UserError(
                f"ngram looks up lengths {shortest} to {longest}: give 1 <= shortest <= longest"
            )
        self.longest, self.shortest = longest, shortest

    @classmethod
    def build(cls, options: Mapping[str, object], shape: TargetShape) -> "NgramDrafter":
        """Make one from its options."""
        return cls(**checked(cls.name, options, {"longest": int, "shortest": int}))

    def options(self) -> dict[str, object]:
        """Return the lengths."""
        return {"longest": self.longest, "shortest": self.shortest}

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "NgramSession":
        """Start a session; of the growth only the levels count."""
        return NgramSession(self, growth, rows)


class NgramIndex:
    """The latest continuation of every n-gram of one sequence."""

    def __init__(self, longest: int, shortest: int) -> None:
        """Start empty."""
        self.lengths = range(longest, shortest - 1, -1)
        self.ids: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; n-grams that end before the new end become known."""
        for token in tokens:
            # the n-gram that ends at the last token is entered only now that something follows it
            for length in self.lengths:
                if len(self.ids) >= length:
                    self.after[tuple(self.ids[-length:])] = len(self.ids)
            self.ids.append(token)

    def guess(self, count: int) -> list[int]:
        """Return up to `count` tokens that followed the latest match of the longest n-gram."""
        for length in self.lengths:
            start = self.after.get(tuple(self.ids[-length:])) if len(self.ids) >= length else None
            if start is not None:
                return self.ids[start : start + count]
        return []


class NgramSession:
    """One index a row."""

    features = Features()

    def __init__(self, drafter: NgramDrafter, growth: Growth, rows: int) -> None:
        """Start without sequences."""
        self.drafter, self.growth = drafter, growth
        self.indices = [self._empty() for _ in range(rows)]

    def _empty(self) -> NgramIndex:
        return NgramIndex(self.drafter.longest, self.drafter.shortest)

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Extend each row's index by what it emitted; a prefill starts it afresh."""
        for row, commit in enumerate(commits):
            if commit is None:
                continue
            if commit.tree is None:
                self.indices[row] = self._empty()
                self.indices[row].extend(commit.inputs.tolist())
            self.indices[row].extend(commit.emitted)

    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        """Propose a chain, or the root alone where nothing matches."""
        levels = self.growth.levels
        return [
            None if coins is None else TokenTree.chain([index.ids[-1], *index.guess(levels)])
            for coins, index in zip(random, self.indices, strict=True)
        ]

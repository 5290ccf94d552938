"""`bigram`: a drafter that is not in the library. What most often followed the last token in chats.

    drafters benchmark --plugin examples/bigram.py --target T --prompts configs/prompts/demo.jsonl \
        --drafter bigram:chats=configs/chats,gamma=3

One file, no edit of the engine: a drafter class (what it is made of) and a session (the state of
the rows that it drafts for). docs/adding_a_drafter.md walks through it.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
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
class BigramDrafter:
    """The likeliest successor of every token, counted once.

    Args:
        after: token -> the token that followed it most often.
        chats: where they were counted; empty: nothing is known, nothing is drafted.
    """

    name: ClassVar[str] = "bigram"
    features = Features()  # it reads no states of the target

    def __init__(self, after: Mapping[int, int], chats: str = "") -> None:
        """Keep the table."""
        self.after, self.chats = dict(after), chats

    @classmethod
    def build(cls, options: Mapping[str, object], shape: TargetShape) -> "BigramDrafter":
        """Make one from the options behind the colon; count its chats.

        Raises:
            UserError: an unknown option, or chats that another tokenizer wrote.
        """
        given = checked(cls.name, options, {"chats": str})
        chats = given.get("chats", "")
        table = successors(chats) if chats else {}
        if any(token >= shape.vocab_size for token in table.values()):
            raise UserError(f"bigram: {chats} holds ids beyond this target's {shape.vocab_size}")
        return cls(table, chats)

    def options(self) -> dict[str, object]:
        """Return what `build` makes the same drafter from."""
        return {"chats": self.chats} if self.chats else {}

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "BigramSession":
        """Start a session; of the growth only the number of levels counts."""
        return BigramSession(self.after, growth.levels, rows)


class BigramSession:
    """The last token of every row."""

    features = Features()

    def __init__(self, after: Mapping[int, int], levels: int, rows: int) -> None:
        """Start without sequences."""
        self.after, self.levels = after, levels
        self.last = [0] * rows

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Remember where each row stands; None: nothing happened in this row."""
        for row, commit in enumerate(commits):
            if commit is not None:
                self.last[row] = commit.root

    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        """Propose a chain below the last token; None for a row that is finished.

        The nodes are point masses (they were not drawn), so the output follows the target's law
        whatever is proposed here.
        """
        return [
            None if coins is None else TokenTree.chain([last, *self._guess(last)])
            for coins, last in zip(random, self.last, strict=True)
        ]

    def _guess(self, token: int) -> list[int]:
        guess: list[int] = []
        while len(guess) < self.levels and (follower := self.after.get(token)) is not None:
            guess.append(token := follower)
        return guess


def successors(chats: str) -> dict[int, int]:
    """Count which token most often followed each one in chats that make_chats.py wrote."""
    from training.records import read_records

    counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for record in read_records(chats):
        for token, follower in pairwise([] if record.ids is None else record.ids.tolist()):
            counts[token][follower] += 1
    if not counts:
        raise UserError(f"bigram: {chats} holds no ids: give chats that make_chats.py wrote")
    return {token: found.most_common(1)[0][0] for token, found in counts.items()}

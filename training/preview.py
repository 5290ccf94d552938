"""Preview: what a run would learn from, seen before it starts.

What is coloured is what is learned. A position's target is the token after it, so the mask of a
token decides whether the position before it is learned from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from drafters.errors import UserError
from drafters.vocab import choose, coverage
from training.commandline import MARKED, spelt
from training.examples import Example

LEARNED, READ = "bold green", "dim"


@dataclass(frozen=True)
class Coverage:
    """What a reduced draft vocabulary covers.

    Args:
        size: ids of the draft vocabulary.
        training: share of the training answers' tokens.
        held_out: share of the held-out ones: what a drafter that is always right within these ids
            would be right on, so a ceiling on alpha.
    """

    size: int
    training: float
    held_out: float

    def ceiling(self, gamma: int) -> float:
        """Return the largest tau of a chain: 1 + c + c^2 + .. of the held-out share c.

        >>> Coverage(8, 1.0, 0.5).ceiling(2)
        1.75
        """
        return sum(self.held_out**depth for depth in range(gamma + 1))


def coverages(
    training: Sequence[Example],
    held_out: Sequence[Example],
    vocab_size: int,
    always: set[int],
    sizes: Sequence[int],
) -> list[Coverage]:
    """Choose draft vocabularies from the training answers and see what they cover.

    Args:
        training: counted.
        held_out: measured on.
        vocab_size: of the target.
        always: ids that every vocabulary holds.
        sizes: asked for; those beyond the target's vocabulary are left out.

    Raises:
        UserError: if a size does not hold the required ids.
    """
    counts, other = answer_counts(training, vocab_size), answer_counts(held_out, vocab_size)
    found: list[Coverage] = []
    for size in (s for s in sizes if s <= vocab_size):
        ids = choose(counts, size, always)
        found.append(Coverage(size, coverage(counts, ids), coverage(other, ids)))
    return found


def answer_counts(examples: Sequence[Example], vocab_size: int) -> Tensor:
    """Count the supervised tokens [V]."""
    tokens = torch.cat([example.ids[example.label_mask] for example in examples])
    return torch.bincount(tokens, minlength=vocab_size)


def kept_always(tokenizer: Any, ends: set[int], training: Sequence[Example]) -> set[int]:
    """Return the ids that every draft vocabulary holds: ends, and special tokens that are seen."""
    seen = set(torch.cat([example.ids for example in training]).unique().tolist())
    special = set(tokenizer.all_special_ids if tokenizer is not None else [])
    return ends | (special & seen)


def coloured(example: Example, tokenizer: Any, *, colours: bool = True) -> Text:
    """Return a chat's text: what is learned bold green, or marked; what is only read dim."""
    text = Text()
    for ids, learned in _runs(example):
        said = spelt(tokenizer.decode(ids, skip_special_tokens=False))
        marked = MARKED.format(said) if learned and not colours else said
        text.append(marked, style=LEARNED if learned else READ)
    return text


def positions(example: Example, tokenizer: Any, first: int, count: int) -> Table:
    """Return a table of positions: what is read there, and what is learned to come next."""
    if not 0 <= first < len(example):
        raise UserError(f"position {first}: this chat has positions 0 to {len(example) - 1}")
    table = Table("position", "id", "token", "an answer's", "target id", "target")
    for place in range(first, min(len(example), first + count)):
        known = place + 1 < len(example) and bool(example.label_mask[place + 1])
        target = int(example.ids[place + 1]) if known else None
        table.add_row(
            str(place),
            str(int(example.ids[place])),
            repr(tokenizer.decode([int(example.ids[place])])),
            "yes" if bool(example.label_mask[place]) else "",
            "" if target is None else str(target),
            "" if target is None else repr(tokenizer.decode([target])),
            style=LEARNED if known else READ,
        )
    return table


def first_target(example: Example) -> int:
    """Return the first position that is learned from."""
    return int(example.label_mask[1:].int().argmax())


def _runs(example: Example) -> Iterator[tuple[list[int], bool]]:
    """Yield unbroken runs of ids that are learned or not."""
    run: list[int] = []
    before: bool | None = None
    for token, learned in zip(example.ids.tolist(), example.label_mask.tolist(), strict=True):
        if run and learned != before:
            yield run, bool(before)
            run = []
        run.append(token)
        before = learned
    yield run, bool(before)

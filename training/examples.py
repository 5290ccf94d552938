"""Examples: chats as ids with a label mask, cut to length, and their split.

A chat that teaches nothing is dropped and counted with its reason; what was dropped is part of the
result, so that no run trains on less than it was given without saying so.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafters.errors import UserError
from drafters.target import Target
from training.options import DataSettings
from training.records import Record
from training.template import Refused, Renderer, Unstable

_BUCKETS = 2**32


@dataclass(frozen=True)
class Example:
    """One chat.

    Args:
        id: its name.
        ids: [n] int64.
        label_mask: [n] bool; True where the token itself is an answer's.
    """

    id: str
    ids: Tensor
    label_mask: Tensor

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    @property
    def supervised(self) -> int:
        """Return the number of tokens that can be learned; the first has no law before it."""
        return int(self.label_mask[1:].sum())

    @property
    def prompt(self) -> list[int]:
        """Return the ids before the first answer."""
        return self.ids[: int(self.label_mask.int().argmax())].tolist()


@dataclass
class Report:
    """What became of the chats.

    Args:
        read: chats given.
        kept: examples made of them.
        tokens, supervised: of the examples.
        shortened: cut to data.max_length.
        cut: with an answer that a length limit ended; kept unless data.drop_cut.
        dropped: chats without an example, by reason.
    """

    read: int = 0
    kept: int = 0
    tokens: int = 0
    supervised: int = 0
    shortened: int = 0
    cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        """Return one line."""
        dropped = "; ".join(f"{n} {reason}" for reason, n in self.dropped.most_common())
        return (
            f"{self.read} chats read, {self.kept} kept: {self.tokens} tokens, {self.supervised} "
            f"supervised; {self.shortened} shortened, {self.cut} cut by a length limit; "
            f"dropped: {dropped or 'none'}"
        )


def make_examples(
    records: Sequence[Record], target: Target, settings: DataSettings
) -> tuple[list[Example], Report]:
    """Turn records into examples.

    Raises:
        UserError: an id outside the target's vocabulary, an unstable template unless those chats
            are to be dropped, or nothing left to learn.
    """
    report = Report(read=len(records))
    maker = _Maker(target, settings)
    examples: list[Example] = []
    for record in records:
        report.cut += record.cut
        try:
            example, shortened = maker.make(record)
        except Refused as reason:
            if isinstance(reason, Unstable) and settings.unstable == "error":
                raise UserError(
                    f"{record.where}: {reason}, so its answers would be learned in a context "
                    "they were never given in; split the chat, or set data.unstable=drop"
                ) from None
            report.dropped[str(reason)] += 1
            continue
        report.shortened += shortened
        report.tokens += len(example)
        report.supervised += example.supervised
        examples.append(example)
    report.kept = len(examples)
    if not examples:
        raise UserError(f"{settings.path}: nothing to learn from: {report}")
    return examples, report


class _Maker:
    def __init__(self, target: Target, settings: DataSettings) -> None:
        self.target, self.settings = target, settings
        self.limit = min(settings.max_length, target.shape.max_positions)
        self.renderer: Renderer | None = None

    def make(self, record: Record) -> tuple[Example, bool]:
        """Return a record's example and whether it was shortened, or raise Refused."""
        if record.cut and self.settings.drop_cut:
            raise Refused("whose answer a length limit ended")
        ids, mask = self._ids(record)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.target.shape.vocab_size:
            raise UserError(
                f"{record.where}: ids from {int(ids.min())} to {int(ids.max())}, but the target's "
                f"vocabulary is 0 to {self.target.shape.vocab_size - 1}: chats of another target"
            )
        if not bool(mask[1:].any()):
            raise Refused("without an answer's token")
        if not bool(mask[1 : self.limit].any()):
            raise Refused(f"whose first answer starts after {self.limit} tokens")
        example = Example(record.id, ids[: self.limit], mask[: self.limit])
        return example, len(ids) > self.limit

    def _ids(self, record: Record) -> tuple[Tensor, Tensor]:
        if record.ids is not None:
            mask = torch.tensor(record.label_mask, dtype=torch.bool)
            return torch.tensor(record.ids, dtype=torch.int64), mask
        if self.renderer is None:
            tokenizer, ends = self.target.tokenizer, self.target.eos_ids
            self.renderer = Renderer(tokenizer, ends, self.settings.template_options)
        ids, mask = self.renderer.render(record.messages)
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool)


def split(examples: Sequence[Example], held_out: float) -> tuple[list[Example], list[Example]]:
    """Split into training and held-out examples by a hash of their ids.

    The same chat lands on the same side in every run, whatever else is in the file. The chat with
    the lowest hash is held out in any case.

    Raises:
        UserError: if one chat is all there is.
    """
    if len(examples) < 2:
        raise UserError("one chat is all there is to learn from: give at least two")
    buckets = [_bucket(example.id) for example in examples]
    limit = max(held_out * _BUCKETS, min(buckets) + 1)
    training = [e for e, b in zip(examples, buckets, strict=True) if b >= limit]
    measured = [e for e, b in zip(examples, buckets, strict=True) if b < limit]
    if not training:
        raise UserError(f"data.held_out {held_out} leaves nothing of {len(examples)} chats")
    return training, measured


def first_tokens(examples: Sequence[Example], limit: int | None) -> list[Example]:
    """Return the first examples that hold at most `limit` tokens together, at least one."""
    chosen: list[Example] = []
    held = 0
    for example in examples:
        held += len(example)
        if limit is not None and chosen and held > limit:
            break
        chosen.append(example)
    return chosen


def _bucket(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")

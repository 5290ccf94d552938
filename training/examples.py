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
from training.lesson_settings import DataSettings
from training.messages import Refused, Unstable
from training.reader import ChatReader
from training.records import Record
from training.template import Renderer

_BUCKETS = 2**32


@dataclass(frozen=True)
class Example:
    """One chat.

    Args:
        id: its name.
        ids: [n] int64.
        label_mask: [n] bool; True where the token itself is an answer's.
        documents: lengths of the chats that lie in it one after another; empty: it is one chat.
    """

    id: str
    ids: Tensor
    label_mask: Tensor
    documents: tuple[int, ...] = ()

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
    records: Sequence[Record], target: ChatReader, settings: DataSettings
) -> tuple[list[Example], Report]:
    """Turn records into examples; a chat that is rendered in several contexts gives several.

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
            parts = maker.parts(record)
        except Refused as reason:
            if isinstance(reason, Unstable) and settings.unstable == "error":
                raise UserError(
                    f"{record.where}: {reason}, so its answers would be learned in a context "
                    "they were never given in; mend the chat or the template's options, or set "
                    "data.unstable=drop"
                ) from None
            report.dropped[str(reason)] += 1
            continue
        for number, (ids, mask) in enumerate(parts, start=1):
            name = record.id if len(parts) == 1 else f"{record.id}.{number}"
            try:
                example = maker.example(name, ids, mask)
            except Refused as reason:
                report.dropped[str(reason)] += 1
                continue
            report.shortened += len(ids) > len(example)
            report.tokens += len(example)
            report.supervised += example.supervised
            examples.append(example)
    report.kept = len(examples)
    if not examples:
        raise UserError(f"{settings.path}: nothing to learn from: {report}")
    return examples, report


class _Maker:
    def __init__(self, target: ChatReader, settings: DataSettings) -> None:
        self.target, self.settings = target, settings
        self.limit = min(settings.max_length, target.shape.max_positions)
        self.renderer = Renderer(target.tokenizer, target.eos_ids, settings.template_options)

    def parts(self, record: Record) -> list[tuple[Tensor, Tensor]]:
        """Return a record's ids and masks, or raise Refused."""
        if record.refused is not None:
            raise Refused(record.refused)
        if record.cut and self.settings.drop_cut:
            raise Refused("whose answer a length limit ended")
        if record.ids is not None:
            ids = torch.tensor(record.ids, dtype=torch.int64)
            _check_range(record.where, ids, self.target.shape.vocab_size)
            return [(ids, torch.tensor(record.label_mask, dtype=torch.bool))]
        if record.text is not None:
            rendered = [self.renderer.render_text(record.text)]
        else:
            rendered = self.renderer.render(record.messages, record.tools)
        return [(torch.tensor(x.ids), torch.tensor(x.mask, dtype=torch.bool)) for x in rendered]

    def example(self, name: str, ids: Tensor, mask: Tensor) -> Example:
        """Return an example cut to length, or raise Refused."""
        if not bool(mask[1:].any()):
            raise Refused("without an answer's token")
        if not bool(mask[1 : self.limit].any()):
            raise Refused(f"whose first answer starts after {self.limit} tokens")
        return Example(name, ids[: self.limit], mask[: self.limit])


def _check_range(where: str, ids: Tensor, vocab_size: int) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise UserError(
            f"{where}: ids from {int(ids.min())} to {int(ids.max())}, but the target's "
            f"vocabulary is 0 to {vocab_size - 1}: chats of another target"
        )


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


def pack(examples: Sequence[Example], length: int) -> list[Example]:
    """Lay several chats into one example of at most `length` tokens; each stays its own document.

    The longest come first and every chat goes where the least room is left, so the result depends
    on the lengths and their order alone. A chat's first token has no law before it and is never
    supervised.
    """
    bins: list[list[Example]] = []
    rooms: list[int] = []
    for example in sorted(examples, key=len, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= len(example)]
        if fitting:
            chosen = min(fitting, key=rooms.__getitem__)
            bins[chosen].append(example)
            rooms[chosen] -= len(example)
        else:
            bins.append([example])
            rooms.append(length - len(example))
    return [_packed(group) for group in bins]


def _packed(group: list[Example]) -> Example:
    masks = [example.label_mask.clone() for example in group]
    for mask in masks:
        mask[0] = False
    return Example(
        group[0].id,
        torch.cat([example.ids for example in group]),
        torch.cat(masks),
        tuple(len(example) for example in group),
    )


def _bucket(name: str) -> int:
    # contexts of one chat ("7.1", "7.2") belong on one side
    chat, _, part = name.rpartition(".")
    name = chat if chat and part.isdigit() else name
    return int.from_bytes(
        hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=4).digest(), "big"
    )

"""Shards: a data set that grows on disk, chat by chat, and survives a kill at any moment.

Finished work lies in DIR/shards, one Parquet file for some consecutive chats, written to a
temporary name and renamed; its metadata holds the counts. When enough is there, all of it becomes
DIR/chats.parquet and DIR/manifest.json, and the shards go. A finished data set grows when more is
asked for: it becomes the first shard of what follows.
"""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
import pyarrow as pa
import pyarrow.parquet as pq

from drafters.errors import UserError
from drafters.untrusted import read_object
from drafters.whole import whole_file, write_text
from training.chats import Shard
from training.keys import row_keys

CHATS, MANIFEST = "chats.parquet", "manifest.json"
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("ids", pa.list_(pa.int32())),
        ("label_mask", pa.list_(pa.bool_())),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("finish_reason", pa.string()),
        ("temperature", pa.float64()),
        ("category", pa.string()),
    ]
)
_META = b"drafters"
_CUT = "beyond_the_goal"


@dataclass(frozen=True)
class Goal:
    """When there is enough.

    Args:
        tokens: supervised tokens; None: any number.
        chats: kept chats; None: any number.
        size: chats that can be made at all; None: no end.
    """

    tokens: int | None = None
    chats: int | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges, and that there is an end."""
        for name, value in (("tokens", self.tokens), ("chats", self.chats)):
            if value is not None and value < 1:
                raise UserError(f"--{name} is {value}: give 1 or more")
        if self.tokens is self.chats is self.size is None:
            raise UserError("a self-chat has no end of its own: give --tokens N or --chats N")


@dataclass
class Tally:
    """What the shards hold so far.

    Args:
        made: chats begun, dropped ones included.
        kept: rows of the data set: kept chats.
        supervised: tokens of answers that are kept.
        keys: of kept chats.
        drops, tokens, seconds: as in Shard, added up.
    """

    made: int = 0
    kept: int = 0
    supervised: int = 0
    keys: set[str] = field(default_factory=set)
    drops: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)

    def add(self, meta: Mapping[str, Any]) -> None:
        """Add one shard's counts."""
        self.made += meta["made"]
        self.kept += meta["kept"]
        self.supervised += meta["supervised"]
        self.keys.update(meta["keys"])
        for name in ("drops", "tokens", "seconds"):
            for key, value in meta[name].items():
                getattr(self, name)[key] += value

    def next_size(self, goal: Goal, most: int, longest: int) -> int:
        """Return how many chats the next shard should hold: 0 if the goal is reached.

        Args:
            goal: of the run.
            most: chats of a shard.
            longest: tokens that the answers of a chat can have: so many chats it takes at least.
        """
        wanted = [most]
        if goal.size is not None:
            wanted.append(goal.size - self.made)
        counts = ((self.supervised, goal.tokens, longest), (self.kept, goal.chats, 1))
        for have, need, each in counts:
            if need is None:
                continue
            if have >= need:
                return 0
            if have:
                # some more than it takes on average, so that the last shard is the last
                wanted.append(int((need - have) * self.made / have * 1.1) + 4)
            else:
                wanted.append(-(-need // each))
        return min(wanted)


class ShardFolder:
    """The shards of one run.

    Args:
        folder: of the data set.
        settings: everything that decides what the data are; a run goes on only where these are
            equal.

    Raises:
        UserError: if the folder holds a data set made otherwise (names the first difference), or
            another process is filling it.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Look at what is there."""
        self.folder, self.shards = folder, folder / "shards"
        self.settings: Mapping[str, Any] = json.loads(json.dumps(settings))
        begun = self.shards / "settings.json"
        self.done = (folder / MANIFEST).exists() and not begun.exists()
        known = folder / MANIFEST if self.done else begun
        if known.exists():
            found = read_object(known)
            # a run that goes on may want more, or fewer, than it set out for
            _compare(_identity(found.get("settings", {})), _identity(self.settings), known)
            if self.done and not self._asks_for_more(found):
                return
        elif (folder / CHATS).exists():
            raise UserError(f"{folder} holds chats without a manifest: give another --out")
        self._lock()
        if self.done:
            self._reopen()
        if not begun.exists():
            write_text(begun, json.dumps({"settings": self.settings}))

    def _asks_for_more(self, found: Mapping[str, Any]) -> bool:
        """Tell whether the goal lies beyond a finished data set.

        Raises:
            UserError: if it lies before its end.
        """
        old, new = found["settings"].get("goal"), self.settings.get("goal")
        if old == new:
            return False
        have = {"tokens": found["supervised_tokens"], "chats": found["chats"]}
        if new and all(value is None or value > have[name] for name, value in new.items()):
            return True
        raise UserError(
            f"{self.folder} holds {have['chats']} chats with {have['tokens']} answer tokens "
            f"already: ask for more than that, or give another --out"
        )

    def _reopen(self) -> None:
        """Make a finished data set the first shard; it stays readable until the next is there."""
        self.done = False
        for left in self.files():  # of a run that was killed as it removed them
            left.unlink()
        found = read_object(self.folder / MANIFEST)
        table = pq.read_table(self.folder / CHATS)
        kind = found["settings"]["source"]["kind"]
        meta = {
            "made": found["made"],
            "kept": table.num_rows,
            "supervised": found["supervised_tokens"],
            "keys": [key for row in table.to_pylist() for key in row_keys(row, kind)],
            "drops": found["dropped"] | {_CUT: found[_CUT] + found["dropped"].get(_CUT, 0)},
            "tokens": found["sampled_tokens"],
            "seconds": found["seconds"],
        }
        table = table.replace_schema_metadata({_META: json.dumps(meta)})
        _store(table, self.shards / "00000.parquet")

    def _lock(self) -> None:
        """Own the shards until the process ends: two writers would overwrite each other."""
        _make(self.shards)
        self.lock = filelock.FileLock(self.shards / ".lock")
        try:
            self.lock.acquire(timeout=0)
        except filelock.Timeout:
            raise UserError(
                f"another process is filling {self.folder}: wait for it, or give another --out"
            ) from None

    def files(self) -> list[Path]:
        """Return the finished shards in order; one after a gap does not count."""
        files: list[Path] = []
        while (file := self.shards / f"{len(files):05d}.parquet").exists():
            files.append(file)
        return files

    def tally(self) -> Tally:
        """Count what is there."""
        tally = Tally()
        for file in self.files():
            tally.add(json.loads(pq.read_schema(file).metadata[_META]))
        return tally

    def add(self, shard: Shard) -> dict[str, Any]:
        """Store one more shard and return its counts."""
        meta = {
            "made": shard.made,
            "kept": len(shard.rows),
            "supervised": sum(sum(row["label_mask"]) for row in shard.rows),
            "keys": shard.keys,
            "drops": shard.drops,
            "tokens": shard.tokens,
            "seconds": shard.seconds,
        }
        table = pa.Table.from_pylist(shard.rows, schema=SCHEMA)
        table = table.replace_schema_metadata({_META: json.dumps(meta)})
        _store(table, self.shards / f"{len(self.files()):05d}.parquet")
        return meta

    def finish(self, goal: Goal, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the shards up to the goal, write the manifest, and remove the shards.

        Args:
            goal: rows beyond it are left out.
            manifest: what the caller knows; counts are added.
        """
        tally = self.tally()
        table = pa.concat_tables([pq.read_table(file) for file in self.files()])
        table = table.replace_schema_metadata(None).slice(0, _enough(table, goal))
        _store(table, self.folder / CHATS)
        full = {"settings": self.settings, **manifest, **_counts(table, tally)}
        write_text(self.folder / MANIFEST, json.dumps(full, indent=2) + "\n")
        (self.shards / "settings.json").unlink()  # from here on this run is over
        self.lock.release()
        shutil.rmtree(self.shards)
        self.done = True
        return full


def _identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides every chat: not the goal, and not the folder the target lies in.

    A field of the target that is empty says nothing, and folders of earlier versions lack it.
    """
    target = {k: v for k, v in settings.get("target", {}).items() if k != "name" and v != ""}
    return {k: v for k, v in settings.items() if k != "goal"} | {"target": target}


def _compare(old: Mapping[str, Any], new: Mapping[str, Any], file: Path) -> None:
    for key in [*new, *old]:
        if old.get(key) != new.get(key):
            raise UserError(
                f"{file} is of a run with {key} {old.get(key)!r}, now it is {new.get(key)!r}: "
                "give another --out, or the command it was made by"
            )


def _enough(table: pa.Table, goal: Goal) -> int:
    """Return how many rows reach the goal."""
    tokens = 0
    for rows, mask in enumerate(table["label_mask"].to_pylist()):
        if rows == goal.chats or (goal.tokens is not None and tokens >= goal.tokens):
            return rows
        tokens += sum(mask)
    return table.num_rows


def _counts(table: pa.Table, tally: Tally) -> dict[str, Any]:
    """Return what the manifest says about the data and what became of the rest."""
    supervised = [sum(mask) for mask in table["label_mask"].to_pylist()]
    temperatures: dict[str, dict[str, int]] = {}
    for temperature, tokens in zip(table["temperature"].to_pylist(), supervised, strict=True):
        entry = temperatures.setdefault(f"{temperature:g}", {"chats": 0, "supervised_tokens": 0})
        entry["chats"] += 1
        entry["supervised_tokens"] += tokens
    return {
        "chats": table.num_rows,
        "tokens": sum(len(ids) for ids in table["ids"].to_pylist()),
        "supervised_tokens": sum(supervised),
        "cut_by_length": table["finish_reason"].to_pylist().count("length"),
        "by_temperature": temperatures,
        "by_category": dict(Counter(table["category"].to_pylist())),
        "made": tally.made,
        "dropped": dict(tally.drops.most_common()),
        _CUT: tally.kept - table.num_rows,
        "sampled_tokens": dict(tally.tokens),
        "seconds": {phase: round(value, 1) for phase, value in tally.seconds.items()},
        "tokens_per_second": {
            phase: round(tally.tokens[phase] / value, 1)
            for phase, value in tally.seconds.items()
            if value
        },
        "schema": {field.name: str(field.type) for field in SCHEMA},
    }


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be made ({error.strerror}): give another --out"
        ) from error


def _store(table: pa.Table, file: Path) -> None:
    with whole_file(file) as new:
        pq.write_table(table, new, compression="zstd", compression_level=19)

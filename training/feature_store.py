"""FeatureStore: a folder that keeps the target's states, chat by chat, over epochs and runs.

Shards are safetensors files named by what they hold, written beside their place and renamed, so a
kill costs what was not yet written and nothing else. A chat is found by a digest of its ids and
mask, whatever batch or run it comes in. features.json says what is kept and of which target;
another target, dtype or fewer layers are refused.
"""

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from drafters.errors import UserError
from drafters.fingerprint import Fingerprint
from drafters.target import Target
from drafters.untrusted import read_object
from drafters.whole import left_over, whole_file, write_text
from inference.machine import versions
from training.batches import Document
from training.states import States

ABOUT = "features.json"
SHARD_BYTES = 128 * 2**20  # what a kill can cost
_VERSION = 1
_SUMMARY_BYTES = 8  # a token: normaliser and most likely token


@dataclass(frozen=True)
class Kind:
    """What is kept of every token.

    Args:
        target: whose states.
        target_dtype: what it computed in.
        layers: whose outputs are kept beside the post-norm state, ascending.
        dtype: what states are rounded to, float32 or bfloat16.
        width: of a state.
    """

    target: Fingerprint
    target_dtype: str
    layers: tuple[int, ...]
    dtype: str
    width: int

    @classmethod
    def of(cls, target: Target, layers: Iterable[int], dtype: str) -> "Kind":
        """Return the kind of a target's states."""
        computed = str(target.dtype).removeprefix("torch.")
        width = target.shape.hidden_size
        return cls(Fingerprint.of(target), computed, tuple(layers), dtype, width)

    @property
    def token_bytes(self) -> int:
        """Return the bytes that one token takes."""
        return token_bytes(len(self.layers), self.width, self.dtype)


def token_bytes(layers: int, width: int, dtype: str) -> int:
    """Return the bytes that one token takes, of so many tapped layers."""
    return (layers + 1) * width * getattr(torch, dtype).itemsize + _SUMMARY_BYTES


class FeatureStore:
    """States on disk.

    Args:
        folder: made when the first shard is written.
        kind: what is asked for; a folder that keeps more layers serves it too.

    Raises:
        UserError: if the folder holds something else; names what differs.
    """

    def __init__(self, folder: str | Path, kind: Kind) -> None:
        """Look at what is there."""
        self.folder = Path(folder)
        self.kind = _checked(self.folder, kind)
        self._index: dict[str, tuple[Path, int, int]] = {}
        self._shards: dict[Path, Any] = {}
        self._waiting: dict[str, States] = {}
        self._scan()

    def __contains__(self, chat: Document) -> bool:
        """Tell whether a chat's states are kept."""
        return chat.key in self._index or chat.key in self._waiting

    def get(self, chat: Document) -> States | None:
        """Return a chat's states, or None; other processes may be adding to the folder."""
        key = chat.key
        if key in self._waiting:
            return self._waiting[key]
        if key not in self._index:
            self._scan()
        if key not in self._index:
            return None
        file, start, count = self._index[key]
        shard = self._shards[file]
        span = slice(start, start + count)
        return States.of({name: shard.get_slice(name)[span] for name in shard.keys()})  # noqa: SIM118

    def add(self, chat: Document, states: States) -> None:
        """Keep a chat's states unless they are kept; a shard is written as one is full."""
        if chat in self:
            return
        on_cpu = {name: tensor.detach().cpu() for name, tensor in states.tensors().items()}
        self._waiting[chat.key] = States.of(on_cpu)
        if sum(states.size for states in self._waiting.values()) >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits.

        Raises:
            UserError: if the disk does not take it.
        """
        if not self._waiting:
            return
        parts = [states.tensors() for states in self._waiting.values()]
        tensors = {k: torch.cat([part[k] for part in parts]).contiguous() for k in parts[0]}
        documents = [[key, len(states.last)] for key, states in self._waiting.items()]
        name = blake2b("".join(self._waiting).encode(), digest_size=8).hexdigest()
        file = self.folder / f"{name}.safetensors"
        self.check_room(sum(tensor.nbytes for tensor in tensors.values()))
        self._make_folder()
        with whole_file(file) as new:
            save_file(tensors, new, metadata={"documents": json.dumps(documents)})
        self._waiting.clear()
        self._scan()

    def check_room(self, needed: int) -> None:
        """Refuse what the disk cannot hold.

        Args:
            needed: bytes.

        Raises:
            UserError: says how much is needed and how much is free, or that nothing can be
                written there.
        """
        place = self.folder.absolute()
        while not place.exists():
            place = place.parent
        if not (place.is_dir() and os.access(place, os.W_OK)):
            raise UserError(f"features in {self.folder}: {place} is no folder to write in")
        free = shutil.disk_usage(place).free
        if needed > free:
            raise UserError(
                f"features in {self.folder} need {needed / 2**30:.2f} GiB and "
                f"{free / 2**30:.2f} GiB of the disk are free: give another folder, fewer layers "
                "or less data"
            )

    def missing_bytes(self, chats: Iterable[Document]) -> int:
        """Return the bytes that chats will take which are not kept yet."""
        missing = {chat.key: chat.needed for chat in chats if chat not in self}
        return sum(missing.values()) * self.kind.token_bytes

    def _make_folder(self) -> None:
        about = self.folder / ABOUT
        if not about.exists():
            kind = asdict(self.kind) | {"schema_version": _VERSION, "versions": versions()}
            write_text(about, json.dumps(kind, indent=2) + "\n")

    def _scan(self) -> None:
        """Index the shards that are new."""
        if not self.folder.exists():
            return
        for file in sorted(self.folder.glob("*.safetensors")):
            if file in self._shards:
                continue
            try:
                shard: Any = safe_open(file, "pt")
                documents = json.loads(shard.metadata()["documents"])
            except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f"{file}: not a shard of features ({error}): remove it, its chats will be "
                    "computed again"
                ) from error
            self._shards[file] = shard
            start = 0
            for key, count in documents:
                self._index.setdefault(key, (file, start, count))
                start += count


def _checked(folder: Path, asked: Kind) -> Kind:
    """Return the kind that a folder holds, or the one asked for if it is new."""
    about = folder / ABOUT
    if not about.exists():
        if folder.exists() and (not folder.is_dir() or not all(map(left_over, folder.iterdir()))):
            raise UserError(f"features in {folder}: it holds something else, give another folder")
        return asked
    try:
        found = read_object(about)
        version, _ = found.pop("schema_version"), found.pop("versions", None)
        target, layers = Fingerprint(**found.pop("target")), tuple(found.pop("layers"))
        kind = Kind(target=target, layers=layers, **found)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{about}: not readable ({error}): give another folder") from error
    if version != _VERSION:
        raise UserError(f"{about} has schema_version {version}, this code reads {_VERSION}")
    difference = kind.target.difference(asked.target)
    if difference is not None:
        name, theirs, ours = difference
        raise UserError(
            f"{folder} keeps features of another target ({kind.target.name}): {name} is {theirs}, "
            f"now it is {ours}; give another folder"
        )
    for name in ("target_dtype", "dtype"):
        theirs, ours = getattr(kind, name), getattr(asked, name)
        if theirs != ours:
            raise UserError(f"{folder} keeps features of {name} {theirs}, asked for is {ours}")
    missing = sorted(set(asked.layers) - set(kind.layers))
    if missing:
        raise UserError(
            f"{folder} keeps layers {list(kind.layers)}, but {missing} are read too: give another "
            "folder, or a drafter that reads those"
        )
    return kind

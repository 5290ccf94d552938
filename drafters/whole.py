"""Whole: files and folders that take their place in one step, or not at all.

What is written lies beside its place under a hidden name with the writer's process id. A kill
leaves the old or the new under the place's own name; the next write removes what it left beside.
"""

import ctypes
import errno
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from drafters.errors import UserError

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)


def check_place(path: str | Path, *, folder: bool) -> None:
    """Refuse a place that no file or folder can take, before there is anything to write.

    Raises:
        UserError: says what is in the way.
    """
    place = Path(path)
    _check_kind(place, folder=folder)
    above = next(p for p in (place, *place.parents) if p.exists())
    if above != place and not above.is_dir():
        raise UserError(f"{place}: {above} is a file: give another place")
    if not os.access(above, os.W_OK):
        raise UserError(f"{place}: {above} cannot be written to: give another place")


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a path to write to; the file takes its place when the block ends well.

    Args:
        path: of the file; parents are made.

    Raises:
        UserError: if the disk does not take it or what lies there is no file; it stays.
    """
    place = Path(path)
    _check_kind(place, folder=False)
    with _beside(place) as new:
        yield new
        new.replace(place)


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty folder to fill; it takes its place when the block ends well.

    Args:
        path: of the folder, with everything in it replaced; parents are made.

    Raises:
        UserError: if the disk does not take it or what lies there is no folder; it stays.
    """
    place = Path(path)
    _check_kind(place, folder=True)
    if place.is_symlink():  # the link stays, what it leads to is replaced
        place = place.resolve()
    with _beside(place) as new:
        new.mkdir()
        yield new
        if not place.exists():
            new.rename(place)
        elif not _exchange(new, place):
            _move_in(new, place)


def write_text(path: str | Path, text: str) -> None:
    """Write a text as UTF-8, whole or not at all.

    Raises:
        UserError: if the disk does not take it; the old file stays.
    """
    with whole_file(path) as new:
        new.write_text(text, encoding="utf-8")


def _check_kind(place: Path, *, folder: bool) -> None:
    """Refuse to replace what is of another kind: a device, too, would be gone for all."""
    if not place.exists() or (place.is_dir() if folder else place.is_file()):
        return
    kind = "a folder" if place.is_dir() else "a file" if place.is_file() else "a device or a pipe"
    raise UserError(f"{place} is {kind}: give another place")


@contextmanager
def _beside(place: Path) -> Iterator[Path]:
    """Yield a free name beside a place; whatever has it afterwards is removed."""
    new = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        for left in place.parent.glob(f".{glob.escape(place.name)}.*.part"):
            if not _alive(left):
                _remove(left)
        try:
            yield new
        finally:
            _sweep(new)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{place} cannot be written ({reason}): what was there stays") from error


def left_over(path: Path) -> bool:
    """Tell whether a file is what a killed write left, or one that runs has not finished."""
    return path.name.startswith(".") and path.suffix == ".part"


def _exchange(new: Path, place: Path) -> bool:
    """Swap two folders in one step; False where the system or the file system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if call(_HERE, os.fsencode(new), _HERE, os.fsencode(place), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(number, os.strerror(number), str(place))


def _move_in(new: Path, place: Path) -> None:
    """Replace file by file, folders first, then the last by name: notes tell of nothing to come."""
    kept = {file.name for file in new.iterdir()}
    for file in sorted(new.iterdir(), key=lambda f: (f.is_dir(), f.name), reverse=True):
        if file.is_dir():
            _remove(place / file.name)
        file.replace(place / file.name)
    for stale in place.iterdir():
        if stale.name not in kept:
            _remove(stale)


def _alive(left: Path) -> bool:
    """Tell whether the process that a hidden name names still runs."""
    number = left.suffixes[-2][1:]
    if not number.isdigit():
        return True
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return int(number) != os.getpid()


def _sweep(path: Path) -> None:
    """Remove a file or folder; who asks to stop meanwhile waits for it."""
    try:
        _remove(path)
    except (KeyboardInterrupt, SystemExit):
        _remove(path)
        raise


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

"""Files that appear whole and for good, or not at all, and folders that one process at a time writes into."""

import errno
import fcntl
import os
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DRAFT = re.compile(r"\.(?P<stem>.+)\.[0-9a-f]{32}(\.[^.]*)?")


FULL = (errno.ENOSPC, errno.EDQUOT)


class InUseError(ValueError):
    """Another process writes here; the message says which one, and where."""


@contextmanager
def replacing(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """Temporary names in the paths' folders; what is written there bears the paths' names at the end, and stays.

    Files are fsynced before the renames and the folders after them. The names differ from each other only as the paths
    do, so that a .bin/.idx pair stays a pair. When the block raises, KeyboardInterrupt included, nothing stays and what
    stood at the paths is as before.

    Raises:
        OSError: a file cannot be written.
    """
    # Suffixes are kept, since readers choose by them. mkstemp would make the files private, against the umask.
    unique = uuid.uuid4().hex
    temporary = tuple(path.with_name(f".{path.stem}.{unique}{path.suffix}") for path in paths)
    renamed: list[Path] = []
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        for name in temporary:
            with name.open("rb+") as stream:
                os.fsync(stream.fileno())
        for name, path in zip(temporary, paths, strict=True):
            renamed.append(path)
            name.replace(path)
        renamed.clear()
        for folder in {path.parent for path in paths}:
            fsync_folder(folder)
    finally:
        # An interrupt between two renames must not leave a .bin beside another run's .idx.
        for name in (*temporary, *renamed):
            with suppress(OSError):
                name.unlink()


def write_text(path: Path, text: str) -> None:
    """Put a text file in place, in UTF-8: a reader sees the old content or the new, never a part."""
    with replacing(path) as (draft,):
        draft.write_text(text, encoding="utf-8")


@contextmanager
def owned(folder: Path, stem: str | None = None) -> Iterator[None]:
    """Keep other processes from writing into a folder, or the files of one stem in it, until the block ends.

    The lock (fcntl) is on a file ``.lock`` or ``.STEM.lock``, gone at the end, as are folders made for it that are
    still empty. The lock of a process that was killed dies with it, and what that left of ``replacing`` is removed
    here. Other nodes see the lock where their shared file system has locks (NFS; Lustre mounted with ``flock``); where
    there are none at all, a note says so.

    Raises:
        InUseError: another process has it.
        OSError: the lock's file cannot be made.
    """
    made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    lock = folder / (".lock" if stem is None else f".{stem}.lock")
    handle: int | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _locked(lock)
        for path in _drafts(folder, stem):
            path.unlink(missing_ok=True)
        yield
    finally:
        if handle is not None:
            lock.unlink(missing_ok=True)  # before another process can have it
            os.close(handle)
        for path in made:
            with suppress(OSError):
                path.rmdir()


def _drafts(folder: Path, stem: str | None = None) -> list[Path]:
    """What ``replacing`` left of one stem; of all where None, but for stems that have an owner of their own."""
    found = [(path, match["stem"]) for path in folder.iterdir() if (match := _DRAFT.fullmatch(path.name))]
    if stem is None:
        return [path for path, of in found if not (folder / f".{of}.lock").exists()]
    return [path for path, of in found if of == stem]


def _locked(path: Path) -> int:
    """An open file that this process alone has locked, with who that is in it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(handle, path)
            if os.path.exists(path) and os.path.samestat(os.fstat(handle), os.stat(path)):
                os.truncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its owner ended, and removed it, after it was opened here


def _lock(handle: int, path: Path) -> None:
    try:
        # Not flock, whose locks outlive their process in the children that it forked.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = os.read(handle, 200).decode(errors="replace") or "another process"
            raise InUseError(f"{path.parent} is in use by {holder} (lock {path.name}); wait until it ends") from None
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        print(f"note: {path.parent} has no locks ({error.strerror}); let one process write there", file=sys.stderr)


def room(folder: Path, needed: int | None = None) -> str:
    """How many bytes are free where a folder is or would be made, beside how many are needed."""
    where = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    wanted = "" if needed is None else f" and {needed:,} are needed"
    return f"{shutil.disk_usage(where).free:,} bytes are free in {where}{wanted}"


def reason(error: OSError, folder: Path, needed: int | None = None) -> str:
    """Why a file could not be written; of a full disk, how full."""
    said = error.strerror or str(error)
    return f"{said}: {room(folder, needed)}" if error.errno in FULL else said


def fsync_folder(path: Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

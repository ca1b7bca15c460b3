"""Files that appear whole and for good, or not at all, and folders that one process at a time writes into."""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime.errors import UserError

_DRAFT = re.compile(r"\.(?P<stem>.+)\.[0-9a-f]{32}(\.[^.]*)?")
# Process and lock: fcntl grants a process its own lock again, and the second's end would let go of both.
_HELD: set[tuple[int, str]] = set()

FULL = (errno.ENOSPC, errno.EDQUOT)


class InUseError(UserError):
    """Another writes here, or a lock is in the way that cannot be taken; the message says whose, and where."""


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
def owned(folder: Path, stem: str | None = None, *, wait: bool = False) -> Iterator[None]:
    """Keep other processes from writing into a folder, or the files of one stem in it, until the block ends.

    The lock (fcntl) is on a file ``.lock`` or ``.STEM.lock``, gone at the end, as are folders made for it that are
    still empty. The lock of a process that was killed dies with it, and drafts that it left, files as of ``replacing``
    and folders of such a name, are removed here. Other nodes see the lock where their shared file system has locks
    (NFS; Lustre mounted with ``flock``); where there are none at all, a note says so.

    Args:
        folder: made where it is missing.
        stem: what the files' names begin with; None for the whole folder.
        wait: for another process to end, with a note, instead of an error.

    Raises:
        InUseError: another process has it, this one has it already, or the lock's file is a link or closed to this
            user.
        OSError: the lock's file cannot be made.
    """
    made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    lock = folder / (".lock" if stem is None else f".{stem}.lock")
    held = os.getpid(), os.path.join(os.path.realpath(folder), lock.name)
    if held in _HELD:
        raise InUseError(f"{folder} is in use by this process already (lock {lock.name})")
    handle: int | None = None
    _HELD.add(held)
    try:
        handle = _locked(lock, wait)
        for path in _drafts(folder, stem):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        yield
    finally:
        _HELD.remove(held)
        if handle is not None:
            lock.unlink(missing_ok=True)  # before another process can have it
            os.close(handle)
        for path in made:
            with suppress(OSError):
                path.rmdir()


def _drafts(folder: Path, stem: str | None = None) -> list[Path]:
    """What killed processes left of one stem; of all where None, but for stems that have an owner of their own."""
    found = [(path, match["stem"]) for path in folder.iterdir() if (match := _DRAFT.fullmatch(path.name))]
    if stem is None:
        return [path for path, of in found if not (folder / f".{of}.lock").exists()]
    return [path for path, of in found if of == stem]


def _locked(path: Path, wait: bool) -> int:
    """An open file that this process alone has locked, with who that is in it."""
    while True:
        handle = _opened(path)
        try:
            _lock(handle, path, wait)
            if _is_at(path, handle):
                os.truncate(handle, 0)
                os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its owner ended, and removed it, after it was opened here


def _opened(path: Path) -> int:
    """A lock's file, made with its folder where it is missing, for every user who may write there."""
    attempts = 100
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            attempts -= 1  # an owner that ends removes the folders that it made
            if not attempts:
                raise
        except OSError as error:
            if error.errno == errno.ELOOP and path.is_symlink():
                raise InUseError(f"{path} is a symbolic link, which is no lock; remove it") from None
            if error.errno == errno.EACCES and os.path.lexists(path):
                left = f"{path} was left by uid {os.lstat(path).st_uid} and is closed to you"
                raise InUseError(f"{left}; remove it if that run is over") from None
            raise
        else:
            with suppress(OSError):  # made by another user
                os.fchmod(handle, 0o666)  # whatever the umask: a killed run's lock is to be taken by others too
            return handle


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _lock(handle: int, path: Path, wait: bool) -> None:
    try:
        # Not flock, whose locks outlive their process in the children that it forked.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = os.read(handle, 200).decode(errors="replace") or "another process"
            said = f"{path.parent} is in use by {holder} (lock {path.name})"
            if not wait:
                raise InUseError(f"{said}; wait until it ends") from None
            print(f"note: {said}; waiting until it ends", file=sys.stderr)
            fcntl.lockf(handle, fcntl.LOCK_EX)
        elif error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        else:
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


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_folder(path: Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

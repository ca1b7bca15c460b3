"""Write files atomically and durably, and lock folders against other processes.

A file is written as a draft beside its path, fsynced and renamed: after a crash or a power cut the
path has the old content or the new, never a part.
"""

import errno
import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime.errors import UserError
from runtime.locks import InUseError, Lock, not_a_file

_DRAFT = re.compile(r"\.(?P<stem>.+)\.[0-9a-f]{32}(\.[^.]*)?")
LOCK = ".lock"
"""Name of the lock file in a folder, which exists while a process owns the folder."""
_OWNED: set[tuple[int, str]] = set()
"""(pid, path) of each lock that this process holds. fcntl would grant a process the same lock
twice, and closing either handle would release both."""
Drafts = Callable[..., tuple[Path, ...]]
"""Function that returns a draft path beside each given path."""
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replacing(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """Yield drafts beside ``paths``; rename them to ``paths`` when the block ends (see `drafting`).

    The names of drafts differ only where those of ``paths`` do, so a .bin/.idx pair stays a pair.

    Raises OSError if a draft cannot be written, or if another folder is in its way.
    """
    with drafting() as drafts_of:
        yield drafts_of(*paths)


@contextmanager
def drafting() -> Iterator[Drafts]:
    """Yield a function that maps paths to drafts beside them; rename the drafts at the end.

    A draft may be a file or a folder; a folder needs a path that is free or an empty folder. All
    drafts are fsynced, then renamed in the order of the calls, and then the folders around them are
    fsynced. If the block raises (KeyboardInterrupt included), drafts are removed and the paths are
    as before.

    Raises OSError if a draft cannot be written, or if another folder is in its way.
    """
    unique = uuid.uuid4().hex
    path_of: dict[Path, Path] = {}  # destination, keyed by draft
    renamed: list[Path] = []

    def drafts_of(*paths: Path) -> tuple[Path, ...]:
        drafts = []
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The suffix is kept, since readers choose a format by it. mkstemp would ignore the
            # umask and make private files.
            drafts.append(path.with_name(f".{path.stem}.{unique}{path.suffix}"))
        path_of.update(zip(drafts, paths, strict=True))
        return tuple(drafts)

    try:
        yield drafts_of
        for draft in path_of:
            for path in (*draft.rglob("*"), draft):
                fsync(path)
        for draft, path in path_of.items():
            renamed.append(draft)
            draft.replace(path)
        renamed.clear()
        for folder in {path.parent for path in path_of.values()}:
            fsync(folder)
    finally:
        # An interrupt between two renames must not leave one run's .bin beside another run's .idx.
        incomplete = [path_of[draft] for draft in renamed if not os.path.lexists(draft)]
        for path in (*path_of, *incomplete):
            with suppress(OSError):
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically: a reader sees the old content or the new."""
    with replacing(path) as (draft,):
        draft.write_text(text, encoding="utf-8")


@contextmanager
def owned(folder: Path, stem: str | None = None, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder, or the files of one stem in it, until the block ends.

    The lock (``runtime.locks``) is on ``.lock`` or ``.STEM.lock``. The block's end removes that
    file, and folders made for it that are still empty. A killed process loses its lock; the drafts
    of ``replacing`` that it left are removed here.

    Args:
        folder: created if missing.
        stem: prefix of the files' names; None locks the whole folder.
        wait: print a note and wait for the other process, instead of raising.

    Raises:
        InUseError: another process or this one holds the lock, or its file is a link or this user
            may not open it.
        OSError: the lock file cannot be created.
    """
    new_folders = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    path = folder / (LOCK if stem is None else f".{stem}.lock")
    key = (os.getpid(), os.path.join(os.path.realpath(folder), path.name))
    if key in _OWNED:
        raise InUseError(f"{folder} is in use by this process already (lock {path.name})")
    lock: Lock | None = None
    _OWNED.add(key)
    try:
        lock = Lock(path, wait)
        _remove_drafts(folder, stem)
        yield
    finally:
        _OWNED.remove(key)
        if lock is not None:
            lock.release()
        for new_folder in new_folders:
            with suppress(OSError):
                new_folder.rmdir()


def _remove_drafts(folder: Path, stem: str | None) -> None:
    """Remove the drafts that a killed holder of this lock left in the folder."""
    for path in list(folder.iterdir()):
        match = _DRAFT.fullmatch(path.name)
        if match is None:
            continue
        # A folder's name may contain a dot, so its stem is ambiguous.
        stems = {match["stem"], match["stem"] + (match[2] or "")}
        is_ours = stem is None or stem in stems
        if is_ours and not any((folder / f".{other}.lock").exists() for other in stems - {stem}):
            _remove(path)


def room(folder: Path) -> str:
    """Return, in words, the free bytes on the disk of ``folder``, which need not exist yet."""
    existing = folder
    while not existing.is_dir():
        existing = existing.absolute().parent
    return f"{shutil.disk_usage(existing).free:,} bytes are free in {existing}"


def unwritable(folder: Path, elsewhere: str) -> str:
    """Return why a folder (or its nearest existing parent) is not writable; "" if it is.

    The reason includes the fix. The test writes a nameless file, so a command that fails later
    leaves no file behind. ``elsewhere`` is the fix for a folder without permission, such as
    "choose another --save".
    """
    try:
        existing = folder
        while not existing.exists() and not existing.is_symlink():
            existing = existing.absolute().parent
        if not existing.exists():
            return f"and {existing} is a symlink that leads nowhere; give a folder"
        if not existing.is_dir():
            return f"and {existing} is a file; give a folder"
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return f"which cannot be written to ({error.strerror}); {elsewhere}"


def reason(error: OSError, folder: Path) -> str:
    """Return why a file could not be written; for a full disk, with the free bytes."""
    text = error.strerror or str(error)
    return f"{text}: {room(folder)}" if error.errno in FULL else text


def read_regular(path: Path, max_bytes: int = 1 << 30) -> str:
    """Read a text file of a run or checkpoint; other users may have put something else there.

    Raises:
        UserError: the path is ``not_a_file``, or the file is longer than ``max_bytes``.
        OSError: the file cannot be read.
    """
    kind = not_a_file(path)
    if kind:
        raise UserError(f"{path} is {kind}, not a file; remove it")
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise UserError(
                f"{path} is longer than {max_bytes:,} bytes, so no run wrote it; remove it"
            )
        return file.read(max_bytes).decode(errors="replace")


def sha256(content: Path | str | bytes) -> str:
    """Return the hexadecimal SHA-256 of a file, of a text in UTF-8, or of bytes."""
    if isinstance(content, Path):
        with content.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if isinstance(content, str):
        content = content.encode()
    return hashlib.sha256(content).hexdigest()


def fsync(path: Path) -> None:
    """Make a file's content, or a folder's renames and new names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

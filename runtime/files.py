"""Write files atomically and durably, and lock folders so that one process at a time writes into
them.
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
# (pid, lock): fcntl grants a process its own lock twice, and closing one of the two would release
# both.
LOCK = ".lock"
"""A folder's lock, while a process owns it."""
_HELD: set[tuple[int, str]] = set()
Drafts = Callable[..., tuple[Path, ...]]
"""Function that returns a draft beside each path."""
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replacing(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """Yield drafts beside ``paths``, which the block writes, and rename them to ``paths`` when it
    ends, as `drafting`.

    Their names differ only where ``paths`` do, so that a .bin/.idx pair stays a pair. Raises
    OSError: a draft cannot be written, or another folder has its name.
    """
    with drafting() as drafts_of:
        yield drafts_of(*paths)


@contextmanager
def drafting() -> Iterator[Drafts]:
    """Yield a function of paths that returns drafts beside them, all of which get their names when
    the block ends.

    A draft is a file or a folder, as the block makes it; a folder takes a free name, or an empty
    folder's. All drafts are fsynced before the first is renamed, in the order of the calls, and the
    folders around them after. If the block raises (KeyboardInterrupt included), drafts are removed
    and the paths are as before. Raises OSError: a draft cannot be written, or another folder has
    its name.
    """
    # Keep suffixes: readers choose by them. mkstemp would ignore the umask and make the files
    # private.
    unique = uuid.uuid4().hex
    wanted: dict[Path, Path] = {}  # by draft
    renamed: list[Path] = []

    def drafts_of(*paths: Path) -> tuple[Path, ...]:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        drafts = tuple(path.with_name(f".{path.stem}.{unique}{path.suffix}") for path in paths)
        wanted.update(zip(drafts, paths, strict=True))
        return drafts

    try:
        yield drafts_of
        for draft in wanted:
            for path in (*draft.rglob("*"), draft):
                fsync(path)
        for draft, path in wanted.items():
            renamed.append(draft)
            draft.replace(path)
        renamed.clear()
        for folder in {path.parent for path in wanted.values()}:
            fsync(folder)
    finally:
        # An interrupt between two renames must not leave a .bin beside another run's .idx.
        taken = [wanted[draft] for draft in renamed if not os.path.lexists(draft)]
        for path in (*wanted, *taken):
            with suppress(OSError):
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically: a reader sees the old content or the new, never a part."""
    with replacing(path) as (draft,):
        draft.write_text(text, encoding="utf-8")


@contextmanager
def owned(folder: Path, stem: str | None = None, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder, or the files of one stem in it, against other processes until the block ends.

    The lock (``runtime.locks``) is on ``.lock`` or ``.STEM.lock``. The block's end removes that
    file, and folders made for it that are still empty. A killed process loses its lock; the drafts
    of ``replacing`` that it left are removed here.

    Args:
        folder: created if missing.
        stem: prefix of the files' names; None locks the whole folder.
        wait: print a note and wait for the other process, instead of raising.

    Raises:
        InUseError: another process or this one holds the lock, or its file is a link or closed to
            this user.
        OSError: the lock file cannot be created.
    """
    made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    lock = folder / (LOCK if stem is None else f".{stem}.lock")
    held = os.getpid(), os.path.join(os.path.realpath(folder), lock.name)
    if held in _HELD:
        raise InUseError(f"{folder} is in use by this process already (lock {lock.name})")
    taken: Lock | None = None
    _HELD.add(held)
    try:
        taken = Lock(lock, wait)
        for path in list(folder.iterdir()):
            if found := _DRAFT.fullmatch(path.name):
                names = {
                    found["stem"],
                    found["stem"] + (found[2] or ""),
                }  # a folder's name may have a dot
                mine = stem is None or stem in names
                if mine and not any((folder / f".{name}.lock").exists() for name in names - {stem}):
                    _remove(path)
        yield
    finally:
        _HELD.remove(held)
        if taken is not None:
            taken.release()
        for path in made:
            with suppress(OSError):
                path.rmdir()


def room(folder: Path) -> str:
    """Say how many bytes are free where ``folder`` is or would be."""
    where = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return f"{shutil.disk_usage(where).free:,} bytes are free in {where}"


def unwritable(folder: Path, elsewhere: str) -> str:
    """Say why a folder, or its nearest existing parent if missing, takes no files, and the fix;
    empty if it does.

    A nameless file is made there, so that nothing stays of a command that fails later.
    ``elsewhere`` is the fix if it is closed, such as "choose another --save".
    """
    try:
        existing = next(
            path
            for path in (folder, *folder.absolute().parents)
            if path.exists() or path.is_symlink()
        )
        if not existing.exists():
            return f"and {existing} is a symlink that leads nowhere; give a folder"
        if not existing.is_dir():
            return f"and {existing} is a file; give a folder"
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return f"which cannot be written to ({error.strerror}); {elsewhere}"


def reason(error: OSError, folder: Path) -> str:
    """Say why a file could not be written; for a full disk, with the free bytes."""
    said = error.strerror or str(error)
    return f"{said}: {room(folder)}" if error.errno in FULL else said


def read_regular(path: Path, most: int = 1 << 30) -> str:
    """Read a text file of a run or a checkpoint, which others may have put there.

    Raises:
        UserError: it is ``not_a_file``, or longer than ``most`` bytes.
        OSError: it cannot be read.
    """
    if kind := not_a_file(path):
        raise UserError(f"{path} is {kind}, not a file; remove it")
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise UserError(f"{path} is longer than {most:,} bytes, which no run writes; remove it")
        return file.read(most).decode(errors="replace")


def sha256(of: Path | str | bytes) -> str:
    """Return the SHA-256 of a file, a text in UTF-8 or bytes, in hex."""
    if isinstance(of, Path):
        with of.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(of.encode() if isinstance(of, str) else of).hexdigest()


def fsync(path: Path) -> None:
    """Make a file's contents, or renames and new names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Lock files that one process at a time holds, and that say which, on file systems that several
nodes share too.

The kernel's lock (fcntl) ends with its holder, and other nodes see it where the file system passes
it on: NFS, and Lustre mounted with ``flock``. Where it does not, or each node sees its own locks
alone, the file itself decides: it names its holder, and the holder touches it every BEAT seconds. A
holder on this host is dead if its process is; one on another host, if the file is left untouched
for PATIENCE.
"""

import errno
import fcntl
import os
import re
import socket
import stat
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from runtime.errors import UserError
from runtime.slurm import leave_ending

BEAT = 5.0
PATIENCE = 20.0
"""Seconds without a beat after which a holder on another host is dead: one that only hangs ends at
its next beat.
"""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
RECORD = re.compile(
    r"(?P<holder>process (?P<pid>\d+) on (?P<host>[^\s,]+).*)\n(?P<token>[0-9a-f]{32})\n"
)


KINDS = {
    stat.S_IFREG: "",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a fifo",
}


def not_a_file(path: Path) -> str:
    """Say what is in the place of a file of ours; empty if it is one, or nothing is there.

    Reading a fifo, a socket or a device may never end, and a link reads or writes somewhere else.
    """
    try:
        return KINDS.get(stat.S_IFMT(path.lstat().st_mode), "a socket or device")
    except FileNotFoundError:
        return ""


class InUseError(UserError):
    """A folder is in use, or its lock cannot be taken; the message names the lock and its holder."""


class EndingError(InUseError):
    """Its holder is of this Slurm job: the last start, which is ending."""

    again = True


class Lock:
    """A lock file that this process holds until ``release``."""

    def __init__(self, path: Path, wait: bool) -> None:
        """Take the lock; with ``wait`` print a note and wait for the holder, instead of raising.

        Raises:
            InUseError: another process holds it, or the file is a link or closed to this user.
            OSError: the file cannot be created.
        """
        self._path = path
        job = f", Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
        own = f"process {os.getpid()} on {socket.gethostname()}{job}, since {datetime.now(UTC):%Y-%m-%d %H:%M:%S UTC}"
        self._record = f"{own}\n{uuid.uuid4().hex}\n"
        self._handle = _acquire(path, wait, self._record)
        self._over = threading.Event()
        self._beating = threading.Thread(
            target=self._beat, name=f"beat of {path.name}", daemon=True
        )
        self._beating.start()

    def release(self) -> None:
        """Remove the file and let go of the lock."""
        self._over.set()
        self._beating.join()
        if _is_at(self._path, self._handle):
            self._path.unlink(missing_ok=True)  # before another process can take it
        os.close(self._handle)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with suppress(OSError):  # a server that is away for a while
                if self._touched() not in ("", self._record):
                    self._give_way()

    def _touched(self) -> str:
        """Touch the file, and return what the one at the path says now; empty if there is none."""
        stale = False
        try:
            os.utime(self._handle)
        except OSError as error:
            stale = error.errno == errno.ESTALE  # NFS: another host removed the file
        if not stale and _is_at(self._path, self._handle):
            return os.pread(self._handle, 1000, 0).decode(
                errors="replace"
            )  # a new handle would end the kernel's lock
        return _Seen.at(self._path).text

    def _give_way(self) -> NoReturn:
        """End this process: it hung for so long that another one took it for dead."""
        found = _Seen.at(self._path)
        line = f"{self._path.parent} was taken over by {found.holder}, as this process did not answer; it ends here"
        leave_ending(1, f"error: {line}")
        os.write(2, f"error: {line}\n".encode())
        os._exit(1)


@dataclass(frozen=True)
class _Seen:
    """A lock file as seen at one moment."""

    text: str
    touched: int

    @classmethod
    def at(cls, path: Path) -> "_Seen":
        """Read the file anew, which NFS asks its server for. It releases this process's kernel lock
        on it.
        """
        try:
            with path.open("rb") as file:
                return cls(
                    file.read(1000).decode(errors="replace"), os.fstat(file.fileno()).st_mtime_ns
                )
        except FileNotFoundError:
            return cls("", 0)

    @property
    def record(self) -> re.Match[str] | None:
        """The parts of what a holder wrote, if it is that."""
        return RECORD.fullmatch(self.text)

    @property
    def holder(self) -> str:
        """The holder in words."""
        return self.record["holder"] if self.record else self.text.strip() or "another process"


def _acquire(path: Path, wait: bool, record: str) -> int:
    """Open and lock the file, write into it who this process is, and return its handle."""
    told = False
    while True:
        handle, fresh = _open_or_create(path)
        try:
            holder = _holder(path, handle, fresh)
            if fresh and _is_at(path, handle):
                os.truncate(handle, 0)
                os.pwrite(handle, record.encode(), 0)
                os.fsync(handle)  # other hosts see an empty file until then
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        if holder is None:
            continue  # its owner, or a watcher of a dead one, removed it after it was opened here
        said = f"{path.parent} is in use by {holder.holder} (lock {path.name})"
        if not wait:
            job = re.search(r", Slurm job (\S+),", holder.holder)
            end = (
                f" or end it (kill {holder.record['pid']} on {holder.record['host']})"
                if holder.record
                else ""
            )
            end = f" or end it (scancel {job[1]})" if job else end
            ending = job is not None and os.environ.get("SLURM_JOB_ID") == job[1]
            raise (EndingError if ending else InUseError)(f"{said}; wait until it ends{end}")
        if not told:
            print(f"note: {said}; waiting until it ends", file=sys.stderr)
        told = True
        time.sleep(0.2)


def _holder(path: Path, handle: int, fresh: bool) -> _Seen | None:
    """Return who holds the file; None if this process made it, or it is another one now."""
    locked = _lock(handle)
    while fresh and locked is False:
        time.sleep(0.05)  # another process looks at the empty file; it lets go
        locked = _lock(handle)
    if fresh:
        return None
    if not os.fstat(handle).st_size:
        time.sleep(0.5)  # its maker is about to write who it is
    found = _Seen(os.pread(handle, 1000, 0).decode(errors="replace"), 0)
    here = found.record is not None and found.record["host"] == socket.gethostname()
    if locked is False and (here or not found.record):
        return found  # of another host the server may keep a dead one's lock
    dead = here and found.record is not None and (locked or not _runs(int(found.record["pid"])))
    return _holder_unless_dead(path, handle, found.text, 0 if dead else PATIENCE)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # another user's
    return True


def _holder_unless_dead(path: Path, handle: int, text: str, patience: float) -> _Seen | None:
    """Watch the file: return its holder if it is touched or changes hands; else remove it, as one
    watcher can: None.
    """
    with suppress(OSError):
        fcntl.lockf(handle, fcntl.LOCK_UN)  # reading the file anew does so too
    before = _Seen.at(path)
    if before.text != text:
        return None
    if patience:
        print(
            f"note: {path} is of {before.holder}; watching for {patience:g} s whether that is alive",
            file=sys.stderr,
        )
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(patience / 20)
        if (now := _Seen.at(path)) != before:
            return now if now.text else None
    over = path.with_name(f"{path.name}.over-{before.record['token'] if before.record else ''}")
    try:
        os.link(path, over)
    except FileExistsError:
        with suppress(FileNotFoundError):
            if (
                time.time() - over.stat().st_ctime > PATIENCE
            ):  # its watcher was killed between link and unlink
                over.unlink()  # and look again with patience: others may be about to remove it
                return _holder_unless_dead(path, handle, text, PATIENCE)
        return before
    except FileNotFoundError:
        return None
    try:
        if (
            _Seen.at(over) == before
        ):  # a link to the dead one's file, not to one that was made since
            path.unlink()
    finally:
        over.unlink(missing_ok=True)
    return None


def _open_or_create(path: Path) -> tuple[int, bool]:
    """Open a lock file, writable by every user; create it and its folder if missing. Say whether it
    was.
    """
    attempts = 100
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind := not_a_file(path):  # a fifo would wait for its writer
                raise InUseError(f"{path} is {kind}, which is no lock; remove it")
            try:
                handle, fresh = (
                    os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666),
                    True,
                )
            except FileExistsError:
                handle, fresh = os.open(path, os.O_RDWR | os.O_NOFOLLOW), False
        except FileNotFoundError:
            attempts -= 1  # an owner that ends removes its file and the folders it made
            if not attempts:
                raise
        except OSError as error:
            if error.errno == errno.EACCES and os.path.lexists(path):
                left = f"{path} was left by uid {os.lstat(path).st_uid} and is closed to you"
                raise InUseError(f"{left}; remove it if that run is over") from None
            raise
        else:
            with suppress(OSError):  # another user's file
                os.fchmod(
                    handle, 0o666
                )  # despite the umask: other users must be able to take a killed run's lock
            return handle, fresh


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _lock(handle: int) -> bool | None:
    """Take the kernel's lock; False if another process has it, None if this file system has no
    locks.
    """
    try:
        # Not flock: its locks outlive the process in forked children.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in NO_LOCKS:
            raise
        return None
    return True

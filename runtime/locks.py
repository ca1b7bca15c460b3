"""Lock files that name their holder, also on file systems that several nodes share.

The kernel's lock (fcntl) ends with its holder, and other nodes see it if the file system passes it
on: NFS, and Lustre mounted with ``flock``. On other file systems the file itself decides: it names
its holder, who touches it every BEAT_SECONDS. A holder on this host is dead if its process is; a
holder on another host is dead if the file stays untouched for PATIENCE_SECONDS.
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

BEAT_SECONDS = 5.0
PATIENCE_SECONDS = 20.0
"""Time without a beat after which a holder on another host counts as dead. If it only hung, it ends
itself at its next beat.
"""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
RECORD = re.compile(
    r"(?P<holder>process (?P<pid>\d+) on (?P<host>[^\s,]+).*)\n(?P<token>[0-9a-f]{32})\n"
)


FILE_KINDS = {
    stat.S_IFREG: "",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a fifo",
}


def not_a_file(path: Path) -> str:
    """Return the kind of a path that is not a regular file; "" for a regular or missing file.

    Reading a fifo, a socket or a device may never end, and a link reads or writes somewhere else.
    """
    try:
        return FILE_KINDS.get(stat.S_IFMT(path.lstat().st_mode), "a socket or device")
    except FileNotFoundError:
        return ""


class InUseError(UserError):
    """A folder is in use, or its lock cannot be taken; the message names lock and holder."""


class EndingError(InUseError):
    """The holder is an earlier start of this Slurm job, which is still ending."""

    again = True


class Lock:
    """A lock file that this process holds until ``release``."""

    def __init__(self, path: Path, wait: bool) -> None:
        """Take the lock; with ``wait`` print a note and wait for the holder, instead of raising.

        Raises:
            InUseError: another process holds the lock, or the file is a link or this user may not
                open it.
            OSError: the file cannot be created.
        """
        self._path = path
        job = f", Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
        process = f"process {os.getpid()} on {socket.gethostname()}{job}"
        now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S UTC}"
        self._record = f"{process}, since {now}\n{uuid.uuid4().hex}\n"
        self._handle = _acquire(path, wait, self._record)
        self._released = threading.Event()
        self._beat_thread = threading.Thread(
            target=self._beat, name=f"beat of {path.name}", daemon=True
        )
        self._beat_thread.start()

    def release(self) -> None:
        """Remove the file and release the lock."""
        self._released.set()
        self._beat_thread.join()
        if _is_at(self._path, self._handle):
            self._path.unlink(missing_ok=True)  # removed before another process can take the lock
        os.close(self._handle)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with suppress(OSError):  # the file server is unreachable for a while
                if self._touched() not in ("", self._record):
                    self._give_way()

    def _touched(self) -> str:
        """Touch the file; return the text of the file at the path now, "" if there is none."""
        stale = False
        try:
            os.utime(self._handle)
        except OSError as error:
            stale = error.errno == errno.ESTALE  # on NFS: another host removed the file
        if not stale and _is_at(self._path, self._handle):
            # Closing another handle of the file would end the kernel's lock.
            return os.pread(self._handle, 1000, 0).decode(errors="replace")
        return _Snapshot.of(self._path).text

    def _give_way(self) -> NoReturn:
        """End this process: it hung for so long that another process took over its lock."""
        holder = _Snapshot.of(self._path).holder
        line = (
            f"error: {self._path.parent} was taken over by {holder}, because this process did not "
            "answer; this process ends"
        )
        leave_ending(1, line)
        os.write(2, f"{line}\n".encode())
        os._exit(1)


@dataclass(frozen=True)
class _Snapshot:
    """Text and modification time of a lock file at one moment."""

    text: str
    touched_ns: int

    @classmethod
    def of(cls, path: Path) -> "_Snapshot":
        """Read the file through a new handle, which makes NFS ask its server.

        Closing the handle releases this process's kernel lock on the file.
        """
        try:
            with path.open("rb") as file:
                text = file.read(1000).decode(errors="replace")
                return cls(text, os.fstat(file.fileno()).st_mtime_ns)
        except FileNotFoundError:
            return cls("", 0)

    @property
    def record(self) -> re.Match[str] | None:
        """The parsed fields of the holder's text; None if the text is something else."""
        return RECORD.fullmatch(self.text)

    @property
    def holder(self) -> str:
        """Description of the holder in words."""
        return self.record["holder"] if self.record else self.text.strip() or "another process"


def _acquire(path: Path, wait: bool, record: str) -> int:
    """Open and lock the file, write this process's record into it, and return its handle."""
    has_printed = False
    while True:
        handle, created = _open_or_create(path)
        try:
            holder = _holder(path, handle, created)
            if created and _is_at(path, handle):
                os.truncate(handle, 0)
                os.pwrite(handle, record.encode(), 0)
                os.fsync(handle)  # other hosts see an empty file until this write
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        if holder is None:
            continue  # the file was removed, by its owner or a watcher, after it was opened here

        message = f"{path.parent} is in use by {holder.holder} (lock {path.name})"
        if not wait:
            raise _in_use_error(message, holder)
        if not has_printed:
            print(f"note: {message}; waiting until it ends", file=sys.stderr)
        has_printed = True
        time.sleep(0.2)


def _in_use_error(message: str, holder: _Snapshot) -> InUseError:
    """Return the error of a lock that another process holds, with the command to end it."""
    job = re.search(r", Slurm job (\S+),", holder.holder)
    fix = "wait until it ends"
    if job:
        fix += f" or end it (scancel {job[1]})"
    elif holder.record:
        fix += f" or end it (kill {holder.record['pid']} on {holder.record['host']})"
    if job and os.environ.get("SLURM_JOB_ID") == job[1]:
        return EndingError(f"{message}; {fix}")
    return InUseError(f"{message}; {fix}")


def _holder(path: Path, handle: int, created: bool) -> _Snapshot | None:
    """Return the holder of a lock; None if this process created the file, or the file was
    replaced.
    """
    locked = _lock(handle)
    while created and locked is False:
        time.sleep(0.05)  # another process is looking at the empty file, and will let go
        locked = _lock(handle)
    if created:
        return None
    if not os.fstat(handle).st_size:
        time.sleep(0.5)  # the creator is about to write its record

    snapshot = _Snapshot(os.pread(handle, 1000, 0).decode(errors="replace"), 0)
    record = snapshot.record
    on_this_host = record is not None and record["host"] == socket.gethostname()
    if locked is False and (on_this_host or record is None):
        return snapshot  # else watch: a server may keep the lock of a dead holder on another host
    is_dead = False
    if on_this_host and record is not None:
        is_dead = bool(locked) or not _runs(int(record["pid"]))
    return _holder_unless_dead(path, handle, snapshot.text, 0 if is_dead else PATIENCE_SECONDS)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # it is another user's process
    return True


def _holder_unless_dead(path: Path, handle: int, text: str, patience: float) -> _Snapshot | None:
    """Watch a lock file; return its holder if it is touched or replaced, else remove it.

    A link named by the holder's token ensures that only one of several watchers removes the file:
    otherwise a slow watcher could remove the file of the next holder. Returns None if no file is
    left.
    """
    with suppress(OSError):
        fcntl.lockf(handle, fcntl.LOCK_UN)  # reading through a new handle releases the lock anyway
    first = _Snapshot.of(path)
    if first.text != text:
        return None
    if patience:
        print(
            f"note: {path} belongs to {first.holder}; watching {patience:g} s for a sign of life",
            file=sys.stderr,
        )
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(patience / 20)
        now = _Snapshot.of(path)
        if now != first:
            return now if now.text else None

    token = first.record["token"] if first.record else ""
    link = path.with_name(f"{path.name}.over-{token}")
    try:
        os.link(path, link)
    except FileExistsError:
        with suppress(FileNotFoundError):
            # Another watcher was killed between link and unlink.
            if time.time() - link.stat().st_ctime > PATIENCE_SECONDS:
                link.unlink()
                # Watch again with patience: others may be about to remove the file.
                return _holder_unless_dead(path, handle, text, PATIENCE_SECONDS)
        return first
    except FileNotFoundError:
        return None
    try:
        # The link may point to a file that was created since.
        if _Snapshot.of(link) == first:
            path.unlink()
    finally:
        link.unlink(missing_ok=True)
    return None


def _open_or_create(path: Path) -> tuple[int, bool]:
    """Open a lock file, or create it and its folder; return its handle, and True if created.

    The file is writable by every user, since any user must be able to take a killed run's lock.
    """
    attempts = 100
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kind = not_a_file(path)
            if kind:  # opening a fifo would wait for its writer
                raise InUseError(f"{path} is {kind}, which is not a lock; remove it")
            created = True
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            except FileExistsError:
                created = False
                handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            attempts -= 1  # a process that ends removes its lock file and the folders that it made
            if not attempts:
                raise
        except OSError as error:
            if error.errno == errno.EACCES and os.path.lexists(path):
                owner = os.lstat(path).st_uid
                raise InUseError(
                    f"{path} was left by uid {owner}, and you may not open it; remove it if that "
                    "run is over"
                ) from None
            raise
        else:
            with suppress(OSError):  # the file belongs to another user
                os.fchmod(handle, 0o666)  # set explicitly, since the umask may forbid it
            return handle, created


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _lock(handle: int) -> bool | None:
    """Take the kernel's lock: True if taken, False if held elsewhere, None if locks do not work."""
    try:
        # flock is not used: its locks outlive the process in forked children.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in NO_LOCKS:
            raise
        return None
    return True

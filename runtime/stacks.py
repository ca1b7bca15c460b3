"""Inspect a process: stacks, pending collective, running or stopped."""

import ctypes
import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

DUMP = signal.SIGUSR2
"""Makes a `Process` write its Python stacks into its file, even if no thread of it can take the GIL."""
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Process:
    """A process of this host; ``born`` tells it from a later one with its number."""

    pid: int
    born: str
    stacks: int
    """Its nameless file, which DUMP writes to; it is empty unless another process wants them."""

    @property
    def runs(self) -> bool:
        """Return whether it is there and not stopped."""
        stat = _stat(self.pid)
        return bool(stat) and stat[0] not in "TtZX" and _born(self.pid) == self.born

    def send(self, *signals: signal.Signals) -> None:
        """Signal it, if it is there."""
        if _born(self.pid) == self.born:
            for number in signals:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, number)


@cache
def own_process() -> Process:
    """Return this process, which heeds DUMP from now on."""
    with tempfile.TemporaryFile() as file:
        stacks = os.dup(file.fileno())
    faulthandler.register(DUMP, stacks, all_threads=True)
    return Process(os.getpid(), _born(os.getpid()), stacks)


def place() -> tuple[str, str]:
    """Return the oldest collective that this process waits for, empty if none, and its main thread's line of ours.

    The collective is from torch's flight recorder, which records gloo's and NCCL's, but not gloo's messages between two
    ranks.
    """
    import torch._C._distributed_c10d as c10d

    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and frame.f_back and not _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    line = f"{os.path.relpath(frame.f_code.co_filename, ROOT)}:{frame.f_lineno}" if frame else "its end"
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        for entry in json.loads(getattr(c10d, dump)()).get("entries", []) if hasattr(c10d, dump) else []:
            if not entry["retired"]:
                name = entry["profiling_name"].rpartition(":")[2]
                return f"{name} {entry['collective_seq_id']} of {entry['process_group'][1]}", line
    return "", line


def _is_ours(path: str) -> bool:
    return Path(path).is_relative_to(ROOT) and not Path(path).relative_to(ROOT).parts[0].startswith(".")


def write_own(out: IO[str]) -> None:
    """Write this process's stacks, Python's and the kernel's."""
    print("Python:", file=out, flush=True)
    faulthandler.dump_traceback(out, all_threads=True)
    print(_native(os.getpid()), file=out)


def write_of(out: IO[str], process: Process, until: float) -> None:
    """Write another process's stacks. If it is stopped, this wakes it, as Python's stacks come from itself.

    Waits for them till ``until``, of ``time.monotonic``, and for a second at least.
    """
    print(f"process {process.pid} did not answer\n{_native(process.pid)}\nPython:", file=out, flush=True)
    stacks, size, before = Path(f"/proc/{process.pid}/fd/{process.stacks}"), 1, 0
    with suppress(OSError):  # it is gone
        os.truncate(stacks, 1)  # so that it knows, however late it writes them
        # By its main thread itself: another one may find its frames torn, as it runs on meanwhile.
        ctypes.CDLL(None).tgkill(process.pid, process.pid, DUMP)
        process.send(signal.SIGCONT)
        until = max(until, time.monotonic() + 1)
        while (size == 1 or size != before) and time.monotonic() < until:  # till all of them are written
            time.sleep(0.5)
            size, before = stacks.stat().st_size, size
        out.write(stacks.read_text(errors="replace").strip("\0"))


def _native(pid: int) -> str:
    """Return what Linux tells of a process's threads; the kernel's stack, and others' system calls, only to root."""
    lines = ["\nNative, per thread: name | state | kernel function | system call | kernel stack"]
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        found = {}
        for name in ("comm", "status", "wchan", "syscall", "stack"):
            try:
                found[name] = " <- ".join((task / name).read_text(errors="replace").splitlines())
            except OSError as error:
                found[name] = f"({name}: {error.strerror})"
        found["status"] = found["status"].partition("State:\t")[2].partition(" <- ")[0]
        lines.append(f"{task.name} {' | '.join(found.values())}")
    return "\n".join(lines)


def _born(pid: int) -> str:
    return "".join(_stat(pid)[19:20])


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; empty if there is no such process, or no Linux."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []

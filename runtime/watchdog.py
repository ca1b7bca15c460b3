"""End a run whose ranks no longer make steps: who waits where, and the stacks of all."""

import ctypes
import faulthandler
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, NoReturn

import torch.distributed as dist

from runtime.processes import ROOT, in_time
from runtime.slurm import AGAIN
from runtime.together import SLOWED, call_roll, gather_results, own_connection, wait_for

FOLDER, EXCLUDE = "hangs", "hung_nodes.txt"
"""In a run's folder: the stacks; and the nodes of ranks that did not answer, a line each."""
LEAST_STEPS = 3
ROLL, WRITE = 2.5, 10.0
"""Seconds, on an idle machine, for a hang's roll call; and for ranks that answered it to write
their stacks.
"""
HANG = "longmesh/hang"
DUMP = signal.SIGUSR2
"""Makes a `Process` write its Python stacks into its file, even if no thread of it can take the
GIL.
"""
Places = dict[int, Sequence[str]]
"""Each rank, and what its `pending_collective` returns."""


class Watchdog:
    """Ends a run whose ranks no longer make steps. A context manager, entered and left by all ranks
    together.
    """

    def __init__(self, factor: float, least: float, folder: str | None) -> None:
        """Watch from the third step on.

        Args:
            factor: how many times the median of the last 100 steps a step may take; 0 watches
                nothing.
            least: seconds that it may take in any case.
            folder: of the run, for stacks; by default the system's for temporary files.
        """
        self._factor, self._least, self._folder = (
            factor,
            least,
            Path(folder or tempfile.gettempdir()),
        )
        self._steps = deque[float](maxlen=100)
        self._since, self._paused = time.monotonic(), 0
        self._over, self._told = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "Watchdog":
        self.beat()
        if not self._factor:
            return self
        node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        self._rank, self._ranks = dist.get_rank(), gather_results(lambda: (node, own_process()))
        self._store = own_connection()
        self._threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        self._threads += [
            threading.Thread(
                target=self._listen, args=(own_connection(),), name="hangs", daemon=True
            )
        ]
        for thread in self._threads:
            thread.start()
        return self

    def beat(self, seconds: float | None = None) -> None:
        """Say that this rank moves; ``seconds`` that a step took, if that was one."""
        self._since = time.monotonic()
        if seconds is not None:
            self._steps.append(seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let a block take its time, such as a save."""
        self._paused += 1
        try:
            yield
        finally:
            self.beat()
            self._paused -= 1

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2)  # a store that does not answer keeps it

    def _watch(self) -> None:
        while not self._over.is_set():
            late = False
            if len(self._steps) >= LEAST_STEPS and not self._paused:
                limit = max(self._least, self._factor * statistics.median(self._steps))
                late = time.monotonic() - self._since > limit
            if self._told.wait(min(0.5, self._least / 4)) or late:
                self._end()

    def _listen(self, store: dist.Store) -> None:
        """Hear of ranks that noticed first: medians differ."""
        with suppress(RuntimeError):  # the store's holder is gone
            while not self._over.wait(0.5):
                if store.check([HANG]):
                    self._told.set()

    def _end(self) -> NoReturn:
        """Write the stacks of this rank, and of silent ones on its node; name who waits where; end."""
        time.sleep(0.2)
        if os.fstat(self._ranks[self._rank][1].stacks).st_size:
            time.sleep(
                60
            )  # another rank has woken this one for its stacks, and is about to kill it
        waited, mine = time.monotonic() - self._since, pending_collective()
        self._write(self._rank, write_own_stacks)

        def roll() -> Places:
            self._store.set(HANG, "")
            said = call_roll(self._store, HANG, "\n".join(mine), ROLL)
            return {rank: lines.split("\n") for rank, lines in said.items()}

        def meet() -> None:
            self._store.add(f"{HANG} written", 1)
            wait_for(lambda: self._store.add(f"{HANG} written", 0) >= len(places or ()), WRITE)

        places = in_time(roll, SLOWED * ROLL)
        near = {
            rank: of
            for rank, (node, of) in enumerate(self._ranks)
            if node == self._ranks[self._rank][0]
        }
        if places is None:  # the store's holder is silent
            lost = [
                rank for rank, process in near.items() if rank != self._rank and not process.runs
            ]
        else:
            lost = [rank for rank in range(len(self._ranks)) if rank not in places]
        helps = self._rank == min(rank for rank in near if rank not in lost)
        silent = {rank: near[rank] for rank in lost if helps and rank in near}
        if (
            self._rank == min(places) if places else helps
        ):  # first: stacks may not come before others end
            self._report(waited, places, {self._rank: mine}, lost)
        until = time.monotonic() + WRITE / 2
        for rank, process in silent.items():
            self._write(rank, lambda out, process=process: write_stacks_of(out, process, until))  # type: ignore[misc]
        if places:
            in_time(meet, SLOWED * WRITE)  # a launcher ends all ranks once one has ended
        for process in silent.values():
            process.send(signal.SIGKILL)
        os._exit(AGAIN)  # to be started again without the nodes in EXCLUDE

    def _report(self, waited: float, answers: Places | None, own: Places, lost: list[int]) -> None:
        """Name the ranks that did not answer, and those that wait together, the fewest first."""
        alike, places = defaultdict[str, list[int]](list), answers or own
        for rank, (collective, line) in places.items():
            alike[
                f"waits in {collective}" if collective else f"in no collective, at {line}"
            ].append(rank)
        words = [f"{self._named(lost)} did not answer: stopped, hanging or lost"] if lost else []
        words += (
            []
            if answers
            else [f"the store of {self._named([0])}, or of its torchrun, did not answer"]
        )
        for waits, ranks in sorted(alike.items(), key=lambda item: len(item[1])):
            words.append(f"{self._named(ranks)} {waits} (at {places[ranks[0]][1]})")
        said = f"hung: no step in {waited:.0f} s; {'; '.join(words)}; stacks of all in {self._folder / FOLDER}"
        print(said, file=sys.stderr, flush=True)
        # A silent store hangs with its node, which overrules that only if it misses ranks: once
        # woken it hears all.
        nodes = sorted({self._ranks[rank][0] for rank in lost or ([] if answers else [0])})
        with suppress(OSError):
            with (self._folder / FOLDER / "report.txt").open("a", encoding="utf-8") as report:
                report.write(f"{said}\n")
            with (self._folder / EXCLUDE).open("w" if lost else "x", encoding="utf-8") as file:
                file.write("".join(f"{node}\n" for node in nodes))

    def _named(self, ranks: list[int]) -> str:
        few = ", ".join(f"rank {rank} on {self._ranks[rank][0]}" for rank in ranks[:4])
        return few + (f" and {len(ranks) - 4} others" if len(ranks) > 4 else "")

    def _write(self, rank: int, stacks: Callable[[IO[str]], None]) -> None:
        """Write a rank's file of stacks; a full disk does not keep the run from ending."""
        with suppress(OSError):
            (self._folder / FOLDER).mkdir(exist_ok=True)
            with (self._folder / FOLDER / f"rank-{rank}.txt").open("w", encoding="utf-8") as out:
                stacks(out)


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


def pending_collective() -> tuple[str, str]:
    """Return the oldest collective that this process waits for, empty if none, and its main
    thread's line of ours.

    The collective is from torch's flight recorder, which records gloo's and NCCL's, but not gloo's
    messages between two ranks.
    """
    import torch._C._distributed_c10d as c10d

    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and frame.f_back:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and not path.relative_to(ROOT).parts[0].startswith("."):
            break
        frame = frame.f_back
    line = (
        f"{os.path.relpath(frame.f_code.co_filename, ROOT)}:{frame.f_lineno}"
        if frame
        else "its end"
    )
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        for entry in (
            json.loads(getattr(c10d, dump)()).get("entries", []) if hasattr(c10d, dump) else []
        ):
            if not entry["retired"]:
                name = entry["profiling_name"].rpartition(":")[2]
                return f"{name} {entry['collective_seq_id']} of {entry['process_group'][1]}", line
    return "", line


def write_own_stacks(out: IO[str]) -> None:
    """Write this process's stacks, Python's and the kernel's."""
    print("Python:", file=out, flush=True)
    faulthandler.dump_traceback(out, all_threads=True)
    print(_native(os.getpid()), file=out)


def write_stacks_of(out: IO[str], process: Process, until: float) -> None:
    """Write another process's stacks. If it is stopped, this wakes it, as Python's stacks come from
    itself.

    Waits for them till ``until``, of ``time.monotonic``, and for a second at least.
    """
    print(
        f"process {process.pid} did not answer\n{_native(process.pid)}\nPython:",
        file=out,
        flush=True,
    )
    stacks, size, before = Path(f"/proc/{process.pid}/fd/{process.stacks}"), 1, 0
    with suppress(OSError):  # it is gone
        os.truncate(stacks, 1)  # so that it knows, however late it writes them
        # By its main thread itself: another one may find its frames torn, as it runs on meanwhile.
        ctypes.CDLL(None).tgkill(process.pid, process.pid, DUMP)
        process.send(signal.SIGCONT)
        until = max(until, time.monotonic() + 1)
        while (
            size == 1 or size != before
        ) and time.monotonic() < until:  # till all of them are written
            time.sleep(0.5)
            size, before = stacks.stat().st_size, size
        out.write(stacks.read_text(errors="replace").strip("\0"))


def _native(pid: int) -> str:
    """Return what Linux tells of a process's threads; the kernel's stack, and others' system calls,
    only to root.
    """
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
    """Return the fields of /proc/PID/stat from the third on; empty if there is no such process, or
    no Linux.
    """
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []

"""End a run whose ranks stopped making steps, and report which ranks wait in which collectives.

A collective's own timeout says only that it timed out. Here a rank that is late writes its stacks,
calls the roll of all ranks through the store, and one of them prints who waits where and who did
not answer. The stacks of a silent rank are written by another rank of its node, by waking it.
"""

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
from functools import cache, partial
from pathlib import Path
from typing import IO, NoReturn

import torch.distributed as dist

from runtime.launch.rendezvous import in_time
from runtime.launch.versions import ROOT
from runtime.slurm import AGAIN
from runtime.together import MAX_SLOWDOWN, call_roll, gather_results, open_connection, wait_for

FOLDER = "hangs"
"""Name of the folder for stacks, in the run's folder."""
EXCLUDE = "hung_nodes.txt"
"""File in the run's folder with the nodes of ranks that did not answer, one per line."""
LEAST_STEPS = 3
ROLL_SECONDS = 2.5
"""Time that the roll call of a hang may take on an idle machine."""
WRITE_SECONDS = 10.0
"""Time in which the ranks that answered must write their stacks, on an idle machine."""
HANG = "longmesh/hang"
DUMP = signal.SIGUSR2
"""Signal on which a `Process` writes its Python stacks into its file, even if no thread can take
the GIL.
"""
WaitPoints = dict[int, Sequence[str]]
"""The `pending_collective` of each rank, keyed by rank: the collective, and the source line."""


class Watchdog:
    """Ends a run whose ranks stopped making steps; all ranks enter and leave it together."""

    def __init__(self, factor: float, min_seconds: float, folder: str | None) -> None:
        """Start to watch from the third step on.

        Args:
            factor: how many times the median of the last 100 steps a step may take; 0 watches
                nothing.
            min_seconds: time that a step may take in any case.
            folder: the run's folder, for the stacks; by default the system's temporary folder.
        """
        self._factor = factor
        self._min_seconds = min_seconds
        self._folder = Path(folder or tempfile.gettempdir())
        self._step_seconds = deque[float](maxlen=100)
        self._last_beat = time.monotonic()
        self._paused = 0
        self._finished = threading.Event()
        self._hang_announced = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "Watchdog":
        self.beat()
        if not self._factor:
            return self
        node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        self._rank = dist.get_rank()
        self._ranks = gather_results(lambda: (node, own_process()))
        self._store = open_connection()
        self._threads = [
            threading.Thread(target=self._watch, name="watchdog", daemon=True),
            threading.Thread(
                target=self._listen, args=(open_connection(),), name="hangs", daemon=True
            ),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def beat(self, seconds: float | None = None) -> None:
        """Record that this rank made progress; ``seconds`` is the duration of a finished step."""
        self._last_beat = time.monotonic()
        if seconds is not None:
            self._step_seconds.append(seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the watch until the block ends, for example during a save."""
        self._paused += 1
        try:
            yield
        finally:
            self.beat()
            self._paused -= 1

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        for thread in self._threads:
            thread.join(2)  # a store that does not answer blocks the thread

    def _watch(self) -> None:
        while not self._finished.is_set():
            is_late = False
            if len(self._step_seconds) >= LEAST_STEPS and not self._paused:
                median = statistics.median(self._step_seconds)
                limit = max(self._min_seconds, self._factor * median)
                is_late = time.monotonic() - self._last_beat > limit
            if self._hang_announced.wait(min(0.5, self._min_seconds / 4)) or is_late:
                self._end()

    def _listen(self, store: dist.Store) -> None:
        """Wait for another rank to announce a hang: medians differ, so it may notice first."""
        with suppress(RuntimeError):  # the process that hosts the store has ended
            while not self._finished.wait(0.5):
                if store.check([HANG]):
                    self._hang_announced.set()

    def _end(self) -> NoReturn:
        """Write the stacks of this rank and of its node's silent ranks; report; end the process."""
        time.sleep(0.2)
        if os.fstat(self._ranks[self._rank][1].stacks).st_size:
            # Another rank has woken this rank for its stacks, and is about to kill it.
            time.sleep(60)
        waited = time.monotonic() - self._last_beat
        position = pending_collective()
        self._write(self._rank, write_own_stacks)
        answers = in_time(lambda: self._call_roll(position), MAX_SLOWDOWN * ROLL_SECONDS)
        neighbours = self._processes_of_node()
        lost = self._lost_ranks(answers, neighbours)

        # On each node, the first running rank writes the stacks of the ranks that do not run.
        is_helper = self._rank == min(rank for rank in neighbours if rank not in lost)
        is_reporter = self._rank == min(answers) if answers else is_helper
        if is_reporter:  # report before writing stacks: other ranks may end meanwhile
            self._report(waited, answers, {self._rank: position}, lost)

        silent: dict[int, Process] = {}
        if is_helper:
            silent = {rank: neighbours[rank] for rank in lost if rank in neighbours}
        deadline = time.monotonic() + WRITE_SECONDS / 2
        for rank, process in silent.items():
            self._write(rank, partial(write_stacks_of, process=process, deadline=deadline))

        if answers:
            # A launcher ends all ranks once one has ended, so wait until all have written their
            # stacks.
            num_answers = len(answers)
            in_time(lambda: self._meet_writers(num_answers), MAX_SLOWDOWN * WRITE_SECONDS)
        for process in silent.values():
            process.send(signal.SIGKILL)
        os._exit(AGAIN)  # this status lets the job start again without the nodes in EXCLUDE

    def _call_roll(self, position: tuple[str, str]) -> WaitPoints:
        """Announce the hang and this rank's position; return the positions of all that answer."""
        self._store.set(HANG, "")
        answers = call_roll(self._store, HANG, "\n".join(position), ROLL_SECONDS)
        return {rank: answer.split("\n") for rank, answer in answers.items()}

    def _processes_of_node(self) -> dict[int, "Process"]:
        """Return the processes on this rank's node, keyed by rank."""
        node = self._ranks[self._rank][0]
        processes: dict[int, Process] = {}
        for rank, (other_node, process) in enumerate(self._ranks):
            if other_node == node:
                processes[rank] = process
        return processes

    def _lost_ranks(
        self, answers: WaitPoints | None, neighbours: dict[int, "Process"]
    ) -> list[int]:
        """Return the ranks that do not answer.

        If the store itself is silent, only this node's lost ranks are known, by their processes.
        """
        if answers is not None:
            return [rank for rank in range(len(self._ranks)) if rank not in answers]
        lost: list[int] = []
        for rank, process in neighbours.items():
            if rank != self._rank and not process.runs:
                lost.append(rank)
        return lost

    def _meet_writers(self, count: int) -> None:
        """Wait until ``count`` ranks have written their stacks."""
        key = f"{HANG} written"
        self._store.add(key, 1)
        wait_for(lambda: self._store.add(key, 0) >= count, WRITE_SECONDS)

    def _report(
        self, waited: float, answers: WaitPoints | None, local: WaitPoints, lost: list[int]
    ) -> None:
        """Print the ranks that did not answer, then groups that wait together, the smallest
        first.
        """
        positions = answers or local
        ranks_by_wait = defaultdict[str, list[int]](list)
        for rank, (collective, line) in positions.items():
            wait = f"waits in {collective}" if collective else f"in no collective, at {line}"
            ranks_by_wait[wait].append(rank)

        clauses: list[str] = []
        if lost:
            clauses.append(f"{self._named(lost)} did not answer: stopped, hanging or lost")
        if not answers:
            clauses.append(f"the store of {self._named([0])}, or of its torchrun, did not answer")
        for wait, ranks in sorted(ranks_by_wait.items(), key=lambda item: len(item[1])):
            clauses.append(f"{self._named(ranks)} {wait} (at {positions[ranks[0]][1]})")
        folder = self._folder / FOLDER
        message = (
            f"hung: no step in {waited:.0f} s; {'; '.join(clauses)}; stacks of all in {folder}"
        )
        print(message, file=sys.stderr, flush=True)

        # If the store is silent, the node of rank 0, which holds it, is the suspect. If rank 0
        # wakes up later, it finds all answers in the store. Mode x keeps its empty list from
        # replacing this one; only a list of lost ranks replaces it.
        suspects = lost
        if not lost and not answers:
            suspects = [0]
        nodes = sorted({self._ranks[rank][0] for rank in suspects})
        with suppress(OSError):
            with (folder / "report.txt").open("a", encoding="utf-8") as report:
                report.write(f"{message}\n")
            with (self._folder / EXCLUDE).open("w" if lost else "x", encoding="utf-8") as file:
                file.write("".join(f"{node}\n" for node in nodes))

    def _named(self, ranks: list[int]) -> str:
        text = ", ".join(f"rank {rank} on {self._ranks[rank][0]}" for rank in ranks[:4])
        if len(ranks) > 4:
            text += f" and {len(ranks) - 4} others"
        return text

    def _write(self, rank: int, write_stacks: Callable[[IO[str]], None]) -> None:
        """Write a rank's file of stacks; a full disk does not prevent the end of the run."""
        with suppress(OSError):
            (self._folder / FOLDER).mkdir(exist_ok=True)
            with (self._folder / FOLDER / f"rank-{rank}.txt").open("w", encoding="utf-8") as out:
                write_stacks(out)


@dataclass(frozen=True)
class Process:
    """A process on this host, identified by its number and start time, since numbers are reused."""

    pid: int
    start_time: str
    stacks: int
    """Descriptor of a nameless file for the stacks; empty until another process asks for them."""

    @property
    def runs(self) -> bool:
        """True if the process exists and is not stopped."""
        stat = _stat(self.pid)
        return bool(stat) and stat[0] not in "TtZX" and _start_time(self.pid) == self.start_time

    def send(self, *signals: signal.Signals) -> None:
        """Send signals to the process, if it exists."""
        if _start_time(self.pid) == self.start_time:
            for number in signals:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, number)


@cache
def own_process() -> Process:
    """Return this process, which answers the signal DUMP from now on."""
    with tempfile.TemporaryFile() as file:
        stacks = os.dup(file.fileno())
    faulthandler.register(DUMP, stacks, all_threads=True)
    return Process(os.getpid(), _start_time(os.getpid()), stacks)


def pending_collective() -> tuple[str, str]:
    """Return the oldest unfinished collective ("" if none), and the main thread's line in Longmesh.

    The collective is from torch's flight recorder, which records the collectives of gloo and NCCL,
    but not gloo's messages between two ranks.
    """
    import torch._C._distributed_c10d as c10d

    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and frame.f_back:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and not path.relative_to(ROOT).parts[0].startswith("."):
            break
        frame = frame.f_back
    line = "its end"
    if frame:
        line = f"{os.path.relpath(frame.f_code.co_filename, ROOT)}:{frame.f_lineno}"

    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if not hasattr(c10d, dump):
            continue
        for entry in json.loads(getattr(c10d, dump)()).get("entries", []):
            if not entry["retired"]:
                name = entry["profiling_name"].rpartition(":")[2]
                number = entry["collective_seq_id"]
                return f"{name} {number} of {entry['process_group'][1]}", line
    return "", line


def write_own_stacks(out: IO[str]) -> None:
    """Write the Python and kernel stacks of this process."""
    print("Python:", file=out, flush=True)
    faulthandler.dump_traceback(out, all_threads=True)
    print(_native(os.getpid()), file=out)


def write_stacks_of(out: IO[str], process: Process, deadline: float) -> None:
    """Write another process's stacks; wake it if it is stopped.

    Only the process itself can write its Python stacks. Waits for them until ``deadline``, as
    ``time.monotonic`` counts, but at least one second.
    """
    header = f"process {process.pid} did not answer\n{_native(process.pid)}\nPython:"
    print(header, file=out, flush=True)
    stacks = Path(f"/proc/{process.pid}/fd/{process.stacks}")
    with suppress(OSError):  # the process has ended
        # Make the file nonempty, so that the process sees that its stacks were requested, however
        # late it writes them.
        os.truncate(stacks, 1)
        # Signal the main thread: another would read that thread's frames while they change.
        ctypes.CDLL(None).tgkill(process.pid, process.pid, DUMP)
        process.send(signal.SIGCONT)

        deadline = max(deadline, time.monotonic() + 1)
        size = 1
        previous_size = 0
        while (size == 1 or size != previous_size) and time.monotonic() < deadline:
            time.sleep(0.5)
            previous_size = size
            size = stacks.stat().st_size
        out.write(stacks.read_text(errors="replace").strip("\0"))


def _native(pid: int) -> str:
    """Return Linux's view of a process's threads; only root sees the kernel stack."""
    lines = ["\nNative, per thread: name | state | kernel function | system call | kernel stack"]
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        fields: dict[str, str] = {}
        for name in ("comm", "status", "wchan", "syscall", "stack"):
            try:
                text = (task / name).read_text(errors="replace")
                fields[name] = " <- ".join(text.splitlines())
            except OSError as error:
                fields[name] = f"({name}: {error.strerror})"
        fields["status"] = fields["status"].partition("State:\t")[2].partition(" <- ")[0]
        lines.append(f"{task.name} {' | '.join(fields.values())}")
    return "\n".join(lines)


def _start_time(pid: int) -> str:
    return "".join(_stat(pid)[19:20])


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; empty if there is no such file."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []

"""Ranks that no longer answer: a roll call that names them, and a watchdog that ends a run without steps.

Errors of a lost peer are recognised by the texts of gloo and the store. Not measured under NCCL, whose watchdog ends
the process in C++ before Python sees an error.
"""

import os
import re
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
from pathlib import Path
from typing import IO, Any, NoReturn

import torch.distributed as dist

from runtime.processes import NODE, in_time
from runtime.slurm import AGAIN, leave_ending
from runtime.stacks import own_process, place, write_of, write_own
from runtime.together import gather_results

CLOSED = re.compile(
    r"(Connection (closed|reset) by peer|Broken pipe|remote process exited|Application timeout)[^\n.]*(\.\d+[^\n.]*)*"
)
TIMED_OUT = re.compile(
    r"(Timed out waiting \d+ ?ms for|wait timeout after|Timed out after \d+ seconds waiting for clients)[^\n.]*", re.I
)
HUNG = AGAIN
"""Exit status of all ranks that hang: to be started again without the nodes in EXCLUDE."""
FOLDER, EXCLUDE = "hangs", "hung_nodes.txt"
"""In a run's folder: the stacks; and the nodes of ranks that did not answer, a line each."""
LEAST_STEPS = 3
TURN, SLOWED = 0.05, 10
"""Seconds between two looks at the store, which are counted, as load slows all ranks alike; by how much it may."""
GRACE, ROLL, WRITE = 1.5, 2.5, 10.0
"""Seconds, on an idle machine, for a rank whose connection closed to hear that another one timed out; for a hang's roll
call; and for ranks that answered it to write their stacks."""
HANG, ALONE, SPEAKER = "longmesh/hang", "longmesh/timed out", "longmesh/speaker"
Places = dict[int, Sequence[str]]
"""Each rank, and what its `place` returns."""


def report_unresponsive_ranks(error: RuntimeError, seconds: float) -> bool:
    """Print one line if a collective failed because of a peer; return False, silently, for any other error.

    Ranks that timed out call the roll through the store for up to ``seconds``; one of them names the ranks that do not
    answer: stopped, hanging or gone. A rank whose connection closed reports only that.
    """
    timed_out = TIMED_OUT.search(str(error))
    if (found := timed_out or CLOSED.search(str(error))) is None:
        return False
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    alone = f"rank {rank} ends because a peer of it did ({found[0]})"
    leave_ending(AGAIN, alone)
    before = _at_sigterm(alone)  # the launcher ends this rank as soon as it sees that another ended
    line: str | None = alone
    if dist.is_initialized():
        line = in_time(lambda: _line_of_roll(alone, timed_out, seconds), SLOWED * seconds)
    if line is None:
        advice = "the store does not answer either, which rank 0 holds where torchrun does not: look at rank 0"
        line = f"{alone}; {advice}" if timed_out else alone
    if before is not None:
        signal.signal(signal.SIGTERM, before)
    _say(line)
    time.sleep(0.5)  # let the speaker print: the launcher ends all ranks once one has ended
    return True


def _line_of_roll(alone: str, timed_out: re.Match[str] | None, seconds: float) -> str:
    """Call the roll; return the line that this rank is to say, empty where another one names the silent ranks."""
    store, name = _connection(), "longmesh/answer of rank"
    if timed_out:
        store.set(ALONE, "")
    else:
        _call_roll(store, name, "", min(GRACE, seconds))
        if not store.check([ALONE]):
            return alone
    silent = sorted(set(range(dist.get_world_size())) - _call_roll(store, name, "", seconds).keys())
    if store.add(SPEAKER, 1) > 1:
        return ""
    reason, advice = alone.partition(" (")[2], "where they are only slow, give a longer --distributed-timeout-minutes"
    if not silent:
        return f"ranks waited in vain for each other ({reason}, and all of them answer now; {advice}"
    keys = {other: NODE.format(other) for other in silent}
    nodes = {other: store.get(key).decode() if store.check([key]) else "" for other, key in keys.items()}
    names = ", ".join(f"{other}{node and f' on {node}'}" for other, node in nodes.items())
    ranks = "ranks" if len(silent) > 1 else "rank"
    return f"{ranks} {names} did not answer ({reason}: stopped, hanging or lost, and so the others end; {advice}"


def _at_sigterm(line: str) -> Any:
    """Make SIGTERM print ``line`` and end the process; return the old handler, None if not on the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def end(*_: object) -> NoReturn:
        _say(line)
        os._exit(1)

    return signal.signal(signal.SIGTERM, end)


def _say(line: str) -> None:
    print(line, end="\n" * bool(line), file=sys.stderr, flush=True)


def _connection() -> dist.Store:
    """Return the ranks' store on a connection of its own, as other threads may wait on the shared one."""
    shared: Any = dist.distributed_c10d._get_default_store()
    return shared.clone()


def _call_roll(store: dist.Store, name: str, said: str, seconds: float) -> dict[int, str]:
    """Answer a roll call and wait until all ranks have; return what each rank says that answers in time."""
    keys = [f"{name} {rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], said)
    _wait_for(lambda: store.check(keys), seconds)
    return {rank: store.get(key).decode() for rank, key in enumerate(keys) if store.check([key])}


def _wait_for(holds: Callable[[], bool], seconds: float) -> None:
    for _ in range(round(seconds / TURN)):
        if holds():
            return
        time.sleep(TURN)


class Watchdog:
    """Ends a run whose ranks no longer make steps. Made and left by all ranks together."""

    def __init__(self, factor: float, least: float, folder: str | None) -> None:
        """Watch from the third step on.

        Args:
            factor: how many times the median of the last 100 steps a step may take; 0 watches nothing.
            least: seconds that it may take in any case.
            folder: of the run, for stacks; by default the system's for temporary files.
        """
        self._factor, self._least, self._folder = factor, least, Path(folder or tempfile.gettempdir())
        self._steps = deque[float](maxlen=100)
        self._since, self._paused = time.monotonic(), 0
        self._over, self._told = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        if not factor:
            return
        node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        self._rank, self._ranks = dist.get_rank(), gather_results(lambda: (node, own_process()))
        self._store = _connection()
        self._threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        self._threads += [threading.Thread(target=self._listen, args=(_connection(),), name="hangs", daemon=True)]
        for thread in self._threads:
            thread.start()

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

    def __enter__(self) -> "Watchdog":
        return self

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
            time.sleep(60)  # another rank has woken this one for its stacks, and is about to kill it
        waited, mine = time.monotonic() - self._since, place()
        self._write(self._rank, write_own)
        places = in_time(lambda: self._places(mine), SLOWED * ROLL)
        near = {rank: of for rank, (node, of) in enumerate(self._ranks) if node == self._ranks[self._rank][0]}
        if places is None:  # the store's holder is silent
            lost = [rank for rank, process in near.items() if rank != self._rank and not process.runs]
        else:
            lost = [rank for rank in range(len(self._ranks)) if rank not in places]
        helps = self._rank == min(rank for rank in near if rank not in lost)
        silent = {rank: near[rank] for rank in lost if helps and rank in near}
        if self._rank == min(places) if places else helps:  # first: stacks may not come before others end
            self._tell(waited, places, {self._rank: mine}, lost)
        until = time.monotonic() + WRITE / 2
        for rank, process in silent.items():
            self._write(rank, lambda out, process=process: write_of(out, process, until))  # type: ignore[misc]
        if places:
            in_time(lambda: self._meet(len(places)), SLOWED * WRITE)
        for process in silent.values():
            process.send(signal.SIGKILL)
        os._exit(HUNG)

    def _places(self, mine: Sequence[str]) -> Places:
        """Tell all ranks of the hang, and return the places of those that answer."""
        self._store.set(HANG, "")
        return {rank: said.split("\n") for rank, said in _call_roll(self._store, HANG, "\n".join(mine), ROLL).items()}

    def _meet(self, count: int) -> None:
        """Wait for the others: a launcher ends all ranks once one has ended."""
        self._store.add(f"{HANG} written", 1)
        _wait_for(lambda: self._store.add(f"{HANG} written", 0) >= count, WRITE)

    def _tell(self, waited: float, answers: Places | None, own: Places, lost: list[int]) -> None:
        """Name the ranks that did not answer, and those that wait together, the fewest first."""
        alike, places = defaultdict[str, list[int]](list), answers or own
        for rank, (collective, line) in places.items():
            alike[f"waits in {collective}" if collective else f"in no collective, at {line}"].append(rank)
        words = [f"{self._named(lost)} did not answer: stopped, hanging or lost"] if lost else []
        words += [] if answers else [f"the store of {self._named([0])}, or of its torchrun, did not answer"]
        for waits, ranks in sorted(alike.items(), key=lambda item: len(item[1])):
            words.append(f"{self._named(ranks)} {waits} (at {places[ranks[0]][1]})")
        said = f"hung: no step in {waited:.0f} s; {'; '.join(words)}; stacks of all in {self._folder / FOLDER}"
        print(said, file=sys.stderr, flush=True)
        # A silent store hangs with its node, which overrules that only if it misses ranks: once woken it hears all.
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

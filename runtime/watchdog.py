"""A watchdog per rank: if no step is made for long, it writes all stacks, names who waits where, and ends all ranks."""

import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import torch.distributed as dist

from runtime.slurm import AGAIN
from runtime.stacks import own_process, place, write_of, write_own
from runtime.together import gather_results

HUNG = AGAIN
"""Exit status of all ranks: to be started again without the nodes in EXCLUDE."""
FOLDER, EXCLUDE = "hangs", "hung_nodes.txt"
"""In a run's folder: the stacks; and the nodes of ranks that did not answer, a line each."""
LEAST_STEPS = 3
TURN, TURNS = 0.05, 40  # of looks at the store; turns, not seconds, as load slows all ranks alike
TOLD = "longmesh/hang"

T = TypeVar("T")
Places = dict[int, tuple[str, str]]
"""Of each rank, what `place` returns."""


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
        shared: Any = dist.distributed_c10d._get_default_store()
        self._store, listens = shared.clone(), shared.clone()  # own connections: other threads may wait on the shared
        self._threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        self._threads += [threading.Thread(target=self._listen, args=(listens,), name="hangs", daemon=True)]
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
            late = len(self._steps) >= LEAST_STEPS and not self._paused and time.monotonic() - self._since > self._limit
            if self._told.wait(min(0.5, self._least / 4)) or late:
                self._end()

    @property
    def _limit(self) -> float:
        return max(self._least, self._factor * statistics.median(self._steps))

    def _listen(self, store: dist.Store) -> None:
        """Hear of ranks that noticed first: medians differ."""
        with suppress(RuntimeError):  # the store's holder is gone
            while not self._over.wait(0.5):
                if store.check([TOLD]):
                    self._told.set()

    def _end(self) -> NoReturn:
        """Write the stacks of this rank, and of silent ones on its node; name who waits where; end."""
        time.sleep(0.2)
        if os.fstat(self._ranks[self._rank][1].stacks).st_size:
            time.sleep(60)  # another rank has woken this one for its stacks, and is about to kill it
        waited, mine = time.monotonic() - self._since, place()
        self._write(self._rank, write_own)
        places = _in_time(lambda: self._call(mine))
        near = {rank: of for rank, (node, of) in enumerate(self._ranks) if node == self._ranks[self._rank][0]}
        if places is None:  # the store's holder is silent
            lost = [rank for rank, process in near.items() if rank != self._rank and not process.runs]
        else:
            lost = [rank for rank in range(len(self._ranks)) if rank not in places]
        helps = self._rank == min(rank for rank in near if rank not in lost)
        silent = {rank: near[rank] for rank in lost if helps and rank in near}
        for rank, process in silent.items():
            self._write(rank, lambda out, process=process: write_of(out, process))  # type: ignore[misc]
        if self._rank == min(places) if places else helps:
            self._tell(waited, places, {self._rank: mine}, lost)
        if places:
            _in_time(lambda: self._meet(len(places)))
        for process in silent.values():
            process.send(signal.SIGKILL)
        os._exit(HUNG)

    def _call(self, mine: tuple[str, str]) -> Places:
        """Return the places of all ranks that answer."""
        self._store.set(TOLD, "")
        self._store.set(f"{TOLD} {self._rank}", "\n".join(mine))
        keys = {rank: f"{TOLD} {rank}" for rank in range(len(self._ranks))}
        _wait_for(lambda: self._store.check(list(keys.values())))
        there = {rank: key for rank, key in keys.items() if self._store.check([key])}
        found = {rank: self._store.get(key).decode().partition("\n") for rank, key in there.items()}
        return {rank: (collective, line) for rank, (collective, _, line) in found.items()}

    def _meet(self, count: int) -> None:
        """Wait for the others: a launcher ends all ranks once one has ended."""
        self._store.add(f"{TOLD} written", 1)
        _wait_for(lambda: self._store.add(f"{TOLD} written", 0) >= count)

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


def _wait_for(holds: Callable[[], bool]) -> None:
    for _ in range(TURNS):
        if holds():
            return
        time.sleep(TURN)


def _in_time(call: Callable[[], T]) -> T | None:
    """Return what a call of the store returns; None if the store does not answer."""
    answer: list[T] = []

    def ask() -> None:
        with suppress(RuntimeError):
            answer.append(call())

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(1.5 * TURN * TURNS)
    return answer[0] if answer else None

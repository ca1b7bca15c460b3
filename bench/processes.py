"""Contestants on the CPU: ranks pinned to one core each, and one process with all those cores.

Every process waits for its next step in a blocking read, so that none spins while another is timed.
"""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench.ceilings import matmul_rate
from bench.errors import MeasureError
from bench.peers.packages import attention_of
from bench.workload import DTYPES, Workload, fingerprint
from parallel.context import ContextParallel
from runtime.processes import join

ONE_PROCESS = "one_process"
ANSWER_WITHIN = 600.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["testing.preload"])  # torch is imported once, not by every process


class Times(NamedTuple):
    """Seconds of one forward + backward on one process: by the clock, and of CPU time."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Seat:
    """A process's cores and threads, and its rank among ``ranks``; the single process has no rank."""

    cores: tuple[int, ...]
    threads: int
    rank: int | None
    ranks: int
    folder: str
    methods: tuple[str, ...]


class Contestants:
    """All processes of a run; a context manager that ends them on exit. Methods are named as in ``Workload.plan``.

    Raises:
        MeasureError: a process failed (its traceback is in the message), died or did not answer.
    """

    def __init__(self, work: Workload, methods: tuple[str, ...], cores: list[int]) -> None:
        self._work, self._methods, self._cores = work, methods, cores

    def __enter__(self) -> "Contestants":
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[Any] = []
        size = len(self._cores)
        seats = [
            Seat((core,), 1, rank, size, self._folder.name, self._methods) for rank, core in enumerate(self._cores)
        ]
        seats.append(Seat(tuple(self._cores), size, None, size, self._folder.name, ()))
        pipes = [self._start(seat) for seat in seats]
        self._ranks, self._one = pipes[:-1], pipes[-1:]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def step(self, name: str) -> list[Times]:
        """Run one forward + backward of a method (or ``ONE_PROCESS``); return times by rank."""
        return [Times(*times) for times in self._ask(name, "step")]

    def fingerprint(self, name: str) -> list[float]:
        """Return the sums of squares of out, dq, dk and dv over the whole sequence; also warm up."""
        return list(self._ask(name, "fingerprint")[0])

    def matmul_tflops(self) -> float:
        """Return the single process's matrix multiplication rate in TFLOP/s, on all its threads."""
        return float(self._ask(ONE_PROCESS, "matmul")[0])

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that all these processes have used."""
        return sum(self._ask(ONE_PROCESS, "cpu_seconds")) + (sum(self._ask("", "cpu_seconds")) if self._ranks else 0.0)

    def _start(self, seat: Seat) -> Connection:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_serve, args=(theirs, seat, self._work), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        return ours

    def _ask(self, name: str, request: str) -> list[Any]:
        pipes = self._one if name == ONE_PROCESS else self._ranks
        for pipe in pipes:
            pipe.send((request, name))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + ANSWER_WITHIN
        while len(answers) < len(pipes):
            missing = [pipe for i, pipe in enumerate(pipes) if i not in answers]
            ready = wait(missing, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise MeasureError(f"{name} did not answer {request} within {ANSWER_WITHIN:.0f} s")
            for i in [i for i, pipe in enumerate(pipes) if pipe in ready]:
                try:
                    ok, value = pipes[i].recv()
                except (EOFError, ConnectionResetError):
                    raise MeasureError(f"a process of {name} died without a word at {request}") from None
                if not ok:
                    raise MeasureError(f"{name} failed at {request}:\n{value}")
                answers[i] = value
        return [answers[i] for i in range(len(pipes))]


class Step:
    """A forward + backward that is ready to run, of q, k, v and the gradient of out."""

    def __init__(self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
        self._attend, self._leaves, self._dout = attend, [x.requires_grad_() for x in (q, k, v)], dout

    def __call__(self) -> list[Tensor]:
        """Return out, dq, dk and dv."""
        out = self._attend(*self._leaves)
        return [out.detach(), *torch.autograd.grad(out, self._leaves, self._dout)]


def _serve(pipe: Connection, seat: Seat, work: Workload) -> None:
    """Run a process: take its seat, then answer requests until the other end closes."""
    try:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, seat.cores)  # before any thread is started, so that all inherit it
        torch.set_num_threads(seat.threads)
        answer = _prepare(seat, work)
        while True:
            request, name = pipe.recv()
            pipe.send((True, answer(request, name)))
    except EOFError:
        return
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _prepare(seat: Seat, work: Workload) -> Callable[[str, str], Any]:
    tensors = work.tensors()
    steps: dict[str, Step] = {}
    valid: dict[str, Tensor] = {}  # local rows that are not padding
    if seat.rank is None:
        steps[ONE_PROCESS] = Step(work.attend, *tensors)
        valid[ONE_PROCESS] = torch.arange(work.seq_length)
    else:
        _join(seat.rank, seat.ranks, seat.folder)
        for method in seat.methods:
            # KV moves in the backward too, as in the papers: moving queries gives ring's idle rank the other's work
            cp = ContextParallel(work.plan(method, seat.ranks, backward="kv"), dist.group.WORLD)
            package = method.partition("@")[2]
            attend = attention_of(package) if package else cp.attend
            steps[method] = Step(attend, *(cp.shard(x, dim=1) for x in tensors))
            valid[method] = (cp.positions < work.seq_length).nonzero()[:, 0]

    def answer(request: str, name: str) -> Any:
        if request == "matmul":
            return matmul_rate("cpu", DTYPES[work.dtype])
        if request == "cpu_seconds":
            return time.process_time()
        if request == "step":
            return tuple(_timed(steps[name], together=seat.rank is not None))
        sums = fingerprint([x[:, valid[name]] for x in steps[name]()])
        if seat.rank is not None:
            dist.all_reduce(sums)
        return sums.tolist()

    return answer


def _join(rank: int, size: int, folder: str) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(folder) / "store"), size)
    join(timeout=timedelta(seconds=ANSWER_WITHIN), store=store, rank=rank, world_size=size)


def _timed(step: Step, together: bool) -> Times:
    if together:
        dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return Times(time.perf_counter() - wall, time.process_time() - cpu)

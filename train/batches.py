"""A rank's batches, made while the step before runs; with each the ranks agree on its size and on
whether to go on.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from data.loader import Batch, Batching
from parallel.mesh import Mesh
from runtime.errors import UserError
from runtime.signals import ASKING, StopRequest
from runtime.together import is_first, raise_together
from train.callbacks import DATA, UPDATE, Callback, Step
from train.checkpoint.saving import Saves
from train.tasks.task import Task

T = TypeVar("T")


class Prefetcher(Iterator[T], Generic[T]):
    """The items of an iterator, each made in a thread while its predecessor is in use.

    The first is made by the caller's thread, which then is the one that starts a loader's
    processes. An error is raised where its item is taken. A context manager, which waits for the
    thread to end.
    """

    def __init__(self, items: Iterator[T], device: torch.device) -> None:
        """``device`` is the one that items are made on."""
        self._items = items
        start = (torch.cuda.set_device, (device,)) if device.type == "cuda" else ()
        self._thread = ThreadPoolExecutor(1, "prefetch", *start)
        self._next: Future[T] | None = None

    def __next__(self) -> T:
        item = next(self._items) if self._next is None else self._next.result()
        self._next = self._thread.submit(next, self._items)
        return item

    def wait(self) -> None:
        """Wait until the next item is made, so that no thread runs while processes are forked."""
        if self._next is not None:
            self._next.exception()

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()


class Taken(NamedTuple):
    """The micro-batches of a step on this rank, and what all ranks have of it."""

    micro_batches: list[Batch]
    valid: int
    """Tokens with loss."""
    flops: float


class Clock:
    """The time that this rank spends in parts of steps."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((DATA, UPDATE), 0.0)
        """Since the ranks compared them."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Mark a block as ``DATA``, ``UPDATE`` or ``SAVING`` for torch's profiler, and add its time
        to ``seconds``.
        """
        start = time.perf_counter()
        try:
            with record_function(name):
                yield
        finally:
            if name in self.seconds:
                self.seconds[name] += time.perf_counter() - start


class StopAgreement(Callback):
    """Ends the run before its next batch once a rank is asked to stop, or the run's time is over."""

    def __init__(self, minutes: float | None) -> None:
        """``minutes`` since the process began are the run's time; None is no limit."""
        self.request, self._minutes = StopRequest(), minutes
        self._sums = [0] * (len(ASKING) + 1)
        self._worked = False
        """True once a step is done. Before, no time is over: a run too slow to start would go in
        circles.
        """

    @property
    def agreed(self) -> bool:
        """True once all ranks know that the run ends early."""
        return any(self._sums)

    def requests(self) -> list[bool]:
        """Return what asks this rank to stop: each signal of ASKING, and time, by the first rank's
        clock.
        """
        over = (
            self._minutes is not None
            and time.monotonic() - self.request.started > 60 * self._minutes
        )
        return [
            *(self.request.signal is number for number in ASKING),
            over and self._worked and is_first(),
        ]

    def agree(self, counts: list[float]) -> None:
        """Take how many ranks each asks to stop."""
        self._sums = [int(count) for count in counts]

    def on_step_end(self, step: Step) -> None:
        """Note that this start has done a step."""
        self._worked = True

    def why(self) -> str:
        """Say which signals came to how many processes, and whether the time is over."""
        *signals, over = self._sums
        size = dist.get_world_size()
        came = [
            f"{number.name} to {of} of {size} processes"
            for number, of in zip(ASKING, signals, strict=True)
            if of
        ]
        return ", ".join(came + [f"exit_duration_in_mins {self._minutes} are over"] * bool(over))


class Batches:
    """Takes the batches of steps on this rank, agreeing with the others."""

    def __init__(self, task: Task[Any], clock: Clock, saves: Saves | None) -> None:
        """Set up for a run; ``saves`` are those that go on in the background."""
        self.stop = StopAgreement(task.config.train.exit_duration_in_mins)
        self._clock, self._saves = clock, saves
        self._task, self._flops = task, cache(task.flops_per_token)
        self._again = dist.get_world_size() // task.mesh.dp_cp.size()
        """Ranks that count the same tokens."""
        self.batching = Batching(
            global_batch_size=task.batch_samples,
            micro_batch_size=task.config.train.micro_batch_size,
            dp_rank=task.mesh.dp.get_local_rank(),
            dp_size=task.mesh.dp.size(),
            num_workers=task.config.data.num_workers,
            pin_memory=task.mesh.device.type == "cuda",
        )
        """The division of a global batch among the data-parallel ranks, and how it is read."""

    def prefetched(self, steps: Iterator[list[Batch]]) -> Prefetcher[list[Batch]]:
        """Return this rank's parts of the micro-batches of each step, made while the step before
        runs.
        """
        local = self._task.objective.local
        return Prefetcher(
            ([local(batch) for batch in step] for step in steps), self._task.mesh.device
        )

    def take(self, steps: Iterator[list[Batch]]) -> Taken | None:
        """Take a step's micro-batches, and agree on them; None at the end, on all ranks alike;
        collective.

        A bad sample on one rank raises the same error on all: its flag travels with the count of
        tokens, at no cost. So do requests to stop, after which there is no step to take, and
        whether a save in the background can go on.
        """
        objective, error = self._task.objective, None
        micro_batches: list[Batch] = []
        try:
            with self._clock.part(DATA):
                micro_batches = next(steps, [])
        except (
            UserError,
            RuntimeError,
        ) as caught:  # a sample, its plan, or memory for its copy on the device
            error = caught
        lengths = [length for local in micro_batches for length in objective.lengths(local)]
        flops = sum(length * self._flops(length) for length in lengths) / self._task.mesh.cp.size()
        valid = sum(int(local["count"]) for local in micro_batches)
        can_save = self._saves is not None and self._saves.ready
        counted = [valid, flops, error is not None, can_save, *self.stop.requests()]
        counts = torch.tensor(
            counted, dtype=torch.float64
        )  # not on the device, whose queue it would wait for
        dist.all_reduce(
            counts
        )  # over tp too: it counts the same tokens again, but one rank alone may fail
        tokens, flops, failed, ready, *asked = counts.tolist()
        self.stop.agree(asked)
        if self._saves is not None:
            self._saves.agree(int(ready))
        if self.stop.agreed:
            return None
        if failed:
            with raise_together():
                if error is not None:
                    raise error
        return (
            Taken(micro_batches, int(tokens) // self._again, flops / self._again)
            if micro_batches
            else None
        )


def summed(share: Tensor, mesh: Mesh) -> Tensor:
    """Sum a loss's shares over the ranks with different tokens; pipeline stages without a loss get
    it too.
    """
    for ranks in (mesh.dp_cp, mesh.pp):
        dist.all_reduce(share, group=ranks.get_group())
    return share

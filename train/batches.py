"""Prefetch each rank's batches; before a step, all ranks agree whether to run it, stop or fail."""

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
    """Iterator that makes each item in a thread while the previous one is in use.

    The first item is made by the caller's thread, so that a loader's worker processes are started
    by a thread that lives as long as the run. An error in the prefetching thread is raised when the
    item is taken. Used as a context manager, it waits for the thread to end.
    """

    def __init__(self, items: Iterator[T], device: torch.device) -> None:
        """Prefetch ``items``, which the thread makes on ``device``."""
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


class StepBatch(NamedTuple):
    """This rank's micro-batches of a step, and the global token and FLOP counts."""

    micro_batches: list[Batch]
    valid: int
    """Number of tokens with a loss, on all ranks together."""
    flops: float
    """Training FLOPs of the whole step, on all ranks together."""


class Clock:
    """Measures the seconds that this rank spends in each phase of its steps."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((DATA, UPDATE), 0.0)
        """Seconds per phase since the ranks last compared them, keyed by phase."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Mark a block as a phase for torch's profiler, and time it if it is DATA or UPDATE."""
        start = time.perf_counter()
        try:
            with record_function(name):
                yield
        finally:
            if name in self.seconds:
                self.seconds[name] += time.perf_counter() - start


class StopAgreement(Callback):
    """Ends the run before its next batch on a signal to any rank, or at its time limit.

    A rank that stopped on its own would leave the others waiting in a collective. So each rank
    only adds its requests to the counts that all ranks sum for every batch; all of them then see
    the same sums before the same step.
    """

    def __init__(self, minutes: float | None) -> None:
        """Limit the run to ``minutes`` since the process began; None means no limit."""
        self.request = StopRequest()
        self._minutes = minutes
        self._sums = [0] * (len(ASKING) + 1)
        self._has_stepped = False
        """True after a step; until then the time limit is ignored, since starting may be slow."""

    @property
    def agreed(self) -> bool:
        """True once all ranks know that the run ends early."""
        return any(self._sums)

    def requests(self) -> list[bool]:
        """Return flags for this rank's reasons to stop: each signal of ASKING, then the time limit.

        Only the first rank's clock counts, since clocks differ.
        """
        is_over = (
            self._minutes is not None
            and time.monotonic() - self.request.started > 60 * self._minutes
        )
        signals = [self.request.signal is number for number in ASKING]
        return [*signals, is_over and self._has_stepped and is_first()]

    def agree(self, counts: list[float]) -> None:
        """Store the sums of ``requests`` over all ranks."""
        self._sums = [int(count) for count in counts]

    def on_step_end(self, step: Step) -> None:
        """Record that a step is done: the time limit applies from now on."""
        self._has_stepped = True

    def why(self) -> str:
        """Describe why the run ends: signals and how many processes got each, or the time limit."""
        *signal_counts, over = self._sums
        world_size = dist.get_world_size()
        reasons = []
        for number, count in zip(ASKING, signal_counts, strict=True):
            if count:
                reasons.append(f"{number.name} to {count} of {world_size} processes")
        if over:
            reasons.append(f"the time limit exit_duration_in_mins {self._minutes} was reached")
        return ", ".join(reasons)


class Batches:
    """Takes this rank's batches, and agrees with the other ranks whether to run, stop or fail."""

    def __init__(self, task: Task[Any], clock: Clock, saves: Saves | None) -> None:
        """Set up for a run; pass ``saves`` if checkpoints are saved in the background."""
        self.stop = StopAgreement(task.config.train.exit_duration_in_mins)
        self._clock = clock
        self._saves = saves
        self._task = task
        self._flops_per_token = cache(task.flops_per_token)
        self._replicas = dist.get_world_size() // task.mesh.dp_cp.size()
        """Number of ranks that count the same tokens: the tensor- and pipeline-parallel ranks."""
        self.batching = Batching(
            global_batch_size=task.batch_samples,
            micro_batch_size=task.config.train.micro_batch_size,
            dp_rank=task.mesh.dp.get_local_rank(),
            dp_size=task.mesh.dp.size(),
            num_workers=task.config.data.num_workers,
            pin_memory=task.mesh.device.type == "cuda",
        )
        """Settings for dividing a global batch among data-parallel ranks, and for reading it."""

    def prefetched(self, steps: Iterator[list[Batch]]) -> Prefetcher[list[Batch]]:
        """Return this rank's shard of each step's micro-batches, prefetched one step ahead."""
        to_local = self._task.objective.local
        local_steps = ([to_local(batch) for batch in step] for step in steps)
        return Prefetcher(local_steps, self._task.mesh.device)

    def take(self, steps: Iterator[list[Batch]]) -> StepBatch | None:
        """Take a step's micro-batches if all ranks agree; None if no step follows; collective.

        One all-reduce per step carries everything that ranks must agree on before it: the token and
        FLOP counts, failures, requests to stop, and readiness for a background save. If one rank
        failed, for example at a bad sample, all ranks raise its error; if one was asked to stop, no
        step follows. The counts stay on the CPU, because on the device they would wait for the
        previous step's kernels. They are summed over all ranks, since any single rank may fail, and
        then divided by the number of ranks that count the same tokens.
        """
        objective = self._task.objective
        error = None
        micro_batches: list[Batch] = []
        try:
            with self._clock.part(DATA):
                micro_batches = next(steps, [])
        except (UserError, RuntimeError) as caught:
            # A broken sample, a plan that fails, or no device memory for the copy.
            error = caught

        lengths: list[int] = []
        for local in micro_batches:
            lengths += objective.lengths(local)
        documents_flops = sum(length * self._flops_per_token(length) for length in lengths)
        local_flops = documents_flops / self._task.mesh.cp.size()
        local_valid = sum(int(local["count"]) for local in micro_batches)

        can_save = self._saves is not None and self._saves.ready
        local_counts = [
            local_valid,
            local_flops,
            error is not None,
            can_save,
            *self.stop.requests(),
        ]
        counts = torch.tensor(local_counts, dtype=torch.float64)
        dist.all_reduce(counts)
        valid, flops, failed, ready, *stop_requests = counts.tolist()

        self.stop.agree(stop_requests)
        if self._saves is not None:
            self._saves.agree(int(ready))
        if self.stop.agreed:
            return None
        if failed:
            with raise_together():
                if error is not None:
                    raise error
        if not micro_batches:
            return None
        return StepBatch(micro_batches, int(valid) // self._replicas, flops / self._replicas)


def sum_over_ranks(local_loss: Tensor, mesh: Mesh) -> Tensor:
    """Sum a loss over the ranks with different tokens, and send it to all pipeline stages."""
    for ranks in (mesh.dp_cp, mesh.pp):
        dist.all_reduce(local_loss, group=ranks.get_group())
    return local_loss

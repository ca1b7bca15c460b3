"""Profile some iterations with torch.profiler: traces, and a table of each rank's time by cause."""

import json
import socket
import statistics
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from runtime.errors import UserError
from runtime.files import write_text
from runtime.together import raise_together
from train.callbacks import DATA, SAVING, Callback, say

Interval = tuple[int, int]
"""Start and end in nanoseconds."""
FOLDER = "profile"
COLUMNS = ("compute", "exposed", "communication", "data", "saving", "other", "iteration")
"""Columns of the table, which are names of attributes of ``RankTimes``."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """The iterations to profile; results go to the folder ``profile`` under --save."""

    profile: bool = False
    """Profile some iterations with torch.profiler. This writes a trace (for chrome://tracing) of
    each profiled rank, on a GPU also its memory history, and a table of every rank's time in
    compute, exposed communication, data loading and saving."""
    profile_step_start: int = 10
    """First profiled iteration; the iterations before it are the warm-up."""
    profile_step_end: int = 12
    """First iteration that is no longer profiled."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that write a trace; the table shows all ranks."""

    def __post_init__(self) -> None:
        if not 0 < self.profile_step_start < self.profile_step_end:
            raise UserError(
                f"profile_step_start is {self.profile_step_start} and profile_step_end "
                f"{self.profile_step_end}; the start must be 1 or more, and the end (the first "
                "iteration that is not profiled) larger than the start"
            )


@dataclass(frozen=True)
class RankTimes:
    """A rank's time in seconds per iteration, divided by cause, and its peak memory."""

    rank: int
    host: str
    memory: int
    """Peak bytes of tensors on the compute device, above those at the start of the profile."""
    iteration: float
    compute: float
    communication: float
    """All communication; most of it may be hidden behind compute."""
    exposed: float
    """Communication while nothing is computed."""
    data: float
    saving: float

    @property
    def other(self) -> float:
        """Remaining time: the interpreter, kernel launches, synchronisation."""
        return max(0.0, self.iteration - self.compute - self.exposed - self.data - self.saving)

    @property
    def busy(self) -> float:
        """Time in which the rank does not wait for others."""
        return self.iteration - self.exposed


class Profiler(Callback):
    """Profiles some iterations on every rank, with --profile."""

    def __init__(self, config: ProfileConfig, save: str | None, device: torch.device) -> None:
        """Set up; raises UserError if the run has no --save, or a profiled rank does not exist."""
        self._config = config
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._profile: profile | None = None
        self._first_iteration = 0
        if save is None:
            raise UserError(
                "profile is set, but save is not, and the results go to that folder; give --save "
                "FOLDER"
            )
        world_size = dist.get_world_size()
        for rank in config.profile_ranks:
            if not 0 <= rank < world_size:
                raise UserError(
                    f"profile_ranks has {rank}, but this run has only ranks 0 to {world_size - 1}; "
                    "choose among these"
                )
        self._folder = Path(save) / FOLDER

    def on_step_begin(self, iteration: int) -> None:
        """Start the profile before its first iteration, and end it after its last one."""
        if iteration == self._config.profile_step_start:
            self._start(iteration)
        elif iteration == self._config.profile_step_end:
            self.on_train_end(iteration - 1)

    def _start(self, iteration: int) -> None:
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        self._profile = profile(activities=activities, profile_memory=True)
        self._first_iteration = iteration
        with warnings.catch_warnings():
            # torch 2.11 warns that later cycles discard this one's events, but there are none.
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
            self._profile.start()

    def on_train_end(self, iteration: int) -> None:
        """Write the profile up to this iteration, if one is running; collective."""
        if self._profile is None:
            return
        profiled = self._profile
        self._profile = None
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        profiled.stop()

        assert profiled.profiler is not None
        assert profiled.profiler.kineto_results is not None
        events = profiled.profiler.kineto_results.events()
        local_times = rank_times(events, dist.get_rank(), iteration + 1 - self._first_iteration)
        all_times: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_times, local_times)

        self._write(profiled, all_times)
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
        say(
            f"profiled iterations {self._first_iteration} to {iteration}; see {self._folder}\n"
            f"{table(all_times)}"
        )

    def _write(self, profiled: profile, all_times: list[RankTimes]) -> None:
        """Write the traces of the profiled ranks, and the table of all ranks; collective."""
        rank = dist.get_rank()
        with raise_together():
            self._folder.mkdir(parents=True, exist_ok=True)
            if rank in self._config.profile_ranks:
                profiled.export_chrome_trace(str(self._folder / f"rank-{rank}.json.gz"))
                if self._on_gpu:
                    torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-{rank}.pickle"))
            if rank == 0:
                rows = [asdict(times) for times in all_times]
                write_text(self._folder / "ranks.json", json.dumps(rows, indent=1) + "\n")
                write_text(self._folder / "ranks.md", table(all_times))


def rank_times(events: Iterable[Any], rank: int, iterations: int) -> RankTimes:
    """Return a rank's time by cause, from the events of torch's profiler.

    On a GPU, NCCL's kernels are communication, and all other kernels are compute. On a CPU, gloo's
    operations are communication, and aten's operators are compute.
    """
    # Spans of each kind, in nanoseconds.
    marks: dict[str, list[Interval]] = {DATA: [], SAVING: []}
    operators: list[Interval] = []
    kernels: list[Interval] = []
    messages: list[Interval] = []
    cpu_memory: list[Interval] = []  # pairs of time and bytes
    gpu_memory: list[Interval] = []
    for event in events:
        name = event.name()
        span = (event.start_ns(), event.start_ns() + event.duration_ns())
        on_gpu = "CUDA" in str(event.device_type())
        if on_gpu and (event.is_user_annotation() or "HtoD" in name or "DtoH" in name):
            # Skip spans that FSDP and the optimizer mark, and copies to and from the host, since
            # the GPU may be idle in them.
            continue

        if name == "[memory]":
            memory_changes = gpu_memory if on_gpu else cpu_memory
            memory_changes.append((span[0], event.nbytes()))
        elif name in marks:
            if not on_gpu:
                marks[name].append(span)
        elif name.startswith("gloo:") or (on_gpu and "nccl" in name.lower()):
            messages.append(span)
        elif on_gpu:
            kernels.append(span)
        elif name.startswith("aten::"):
            operators.append(span)

    # On a GPU only kernels count as compute, because operators on the host only launch them. Time
    # in which a rank waits for data or saves does not count as compute or communication.
    lengths, covers = covered([marks[DATA], marks[SAVING], kernels or operators, messages])
    data, saving, compute, communication = covers  # bool [N] each
    compute = compute & ~(data | saving)
    communication = communication & ~(data | saving)
    exposed = communication & ~compute

    spans = [*operators, *kernels, *messages, *marks[DATA], *marks[SAVING]]
    last_end = max((end for _, end in spans), default=0)
    first_start = min((start for start, _ in spans), default=0)
    seconds = [
        int(lengths[pieces].sum()) / 1e9 / iterations
        for pieces in (compute, communication, exposed, data, saving)
    ]

    # The profiler does not return memory events in order.
    changes = sorted(gpu_memory if kernels else cpu_memory, key=lambda change: change[0])
    peak_memory = max(accumulate(size for _, size in changes), default=0)
    iteration_seconds = (last_end - first_start) / 1e9 / iterations
    return RankTimes(rank, socket.gethostname(), peak_memory, iteration_seconds, *seconds)


def covered(kinds: Sequence[Sequence[Interval]]) -> tuple[np.ndarray, np.ndarray]:
    """Cut time where a span starts or ends; return each piece's length and the kinds in it.

    Questions about overlaps then become boolean expressions. For example, communication is exposed
    in a piece that messages cover and compute does not.

    Returns:
        lengths, int64 [N], and whether each kind covers each piece, bool [kinds, N].
    """
    edges: list[int] = []
    for spans in kinds:
        for span in spans:
            edges += span
    times = np.unique(np.array(edges, dtype=np.int64))

    changes = np.zeros((len(kinds), len(times)), dtype=np.int64)  # starts minus ends of spans
    for row, spans in zip(changes, kinds, strict=True):
        starts, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        np.add.at(row, np.searchsorted(times, starts), 1)
        np.add.at(row, np.searchsorted(times, ends), -1)
    num_open = changes.cumsum(1)
    return np.diff(times), num_open[:, :-1] > 0


def table(ranks: list[RankTimes]) -> str:
    """Return a Markdown table of the ranks' milliseconds and memory, and name the slowest rank.

    The slowest rank is the one with the least exposed communication, because the others wait for it
    in collectives.
    """
    lines = [
        "| rank | host | " + " | ".join(COLUMNS) + " | MB |",
        "| ---: | --- |" + " ---: |" * (len(COLUMNS) + 1),
    ]
    for times in ranks:
        cells = [f"{1e3 * getattr(times, column):.1f}" for column in COLUMNS]
        lines.append(
            f"| {times.rank} | {times.host} | {' | '.join(cells)} | {times.memory / 1e6:.1f} |"
        )

    last = max(ranks, key=lambda times: times.busy)
    median = statistics.median(times.busy for times in ranks)
    excess = last.busy / median - 1 if median else 0.0
    summary = (
        "Milliseconds per iteration. "
        f"Slowest: rank {last.rank} on {last.host}, busy {excess:.0%} longer than the median."
    )
    return "\n".join([*lines, "", summary]) + "\n"

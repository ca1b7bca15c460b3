"""Time of each rank: of some iterations by torch.profiler, and compared in every logging interval
for stragglers.
"""

import json
import socket
import statistics
import time
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from model.parts.feed_forward import MLP, SwiGLU
from runtime.errors import UserError
from runtime.files import write_text
from runtime.processes import NODE
from runtime.together import raise_together
from train.callbacks import DATA, SAVING, Callback, Step, say

Interval = tuple[int, int]
"""Start and end in nanoseconds."""
FOLDER = "profile"
PHASES = ("data_ms", "update_ms", "mlp_ms")
"""Fields of a record with a list by rank: per step, waiting for a batch and the optimizer's update;
per call, the first feed-forward layer (0 with --compile). Elsewhere in a step ranks wait for each
other, so all take the same time."""
BEHIND, LEAST_MS = 0.2, 20.0
"""A rank is warned of that is behind by more than this share, and by at least these ms in a step.
"""
CALLS = 64


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which iterations are profiled, into the folder ``profile`` of --save."""

    profile: bool = False
    """Follow some iterations with torch.profiler: a trace for chrome://tracing of each profiled
    rank, the memory's history on a GPU, and a table of compute, exposed communication, data and
    saving of all ranks."""
    profile_step_start: int = 10
    """First profiled iteration; those before warm up."""
    profile_step_end: int = 12
    """Iteration before which profiling ends."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks whose traces are written; the table has all ranks."""

    def __post_init__(self) -> None:
        if not 0 < self.profile_step_start < self.profile_step_end:
            raise UserError(
                f"profile_step_start is {self.profile_step_start} and profile_step_end {self.profile_step_end}; "
                f"profiled are the iterations from the first, 1 or more, to before the second"
            )


@dataclass(frozen=True)
class Spent:
    """A rank's time by what it went into, in seconds per iteration."""

    rank: int
    host: str
    memory: int
    """Most bytes of tensors at once beyond those that were there as it began, of the device that
    computes.
    """
    iteration: float
    compute: float
    communication: float
    """All of it; most may lie behind compute."""
    exposed: float
    """Communication while nothing was computed."""
    data: float
    saving: float

    @property
    def other(self) -> float:
        """Time in which nothing of this was under way: the interpreter, launches, synchronisation."""
        return max(0.0, self.iteration - self.compute - self.exposed - self.data - self.saving)


class Profiler(Callback):
    """Follows some iterations on every rank, with --profile."""

    def __init__(self, config: ProfileConfig, save: str | None, device: torch.device) -> None:
        """Raises UserError if there is no folder for the profile, or a profiled rank is none."""
        self._config, self._device = config, device
        self._profile: profile | None = None
        self._begun = 0
        if save is None:
            raise UserError("profile writes into the folder of --save, and none is given; give one")
        world = dist.get_world_size()
        if missing := [rank for rank in config.profile_ranks if not 0 <= rank < world]:
            raise UserError(f"profile_ranks has {missing[0]}; there are ranks 0 to {world - 1}")
        self._folder = Path(save) / FOLDER

    def on_step_begin(self, iteration: int) -> None:
        """Begin or end before this iteration, where it is the one to do so. Collective at the end."""
        if iteration == self._config.profile_step_start:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (
                self._device.type == "cuda"
            )
            if self._device.type == "cuda":
                torch.cuda.memory._record_memory_history(max_entries=100_000)
            self._profile, self._begun = (
                profile(activities=activities, profile_memory=True),
                iteration,
            )
            with (
                warnings.catch_warnings()
            ):  # torch 2.11's that later cycles keep no events of this one: there are none
                warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
                self._profile.start()
        elif iteration == self._config.profile_step_end:
            self.on_train_end(iteration - 1)

    def on_train_end(self, iteration: int) -> None:
        """Write what was followed up to this iteration, if anything is; collective."""
        if self._profile is None:
            return
        followed, self._profile = self._profile, None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        followed.stop()
        rank, world = dist.get_rank(), dist.get_world_size()
        assert followed.profiler is not None
        assert followed.profiler.kineto_results is not None
        mine = spent(followed.profiler.kineto_results.events(), rank, iteration + 1 - self._begun)
        all_ranks: list[Any] = [None] * world
        dist.all_gather_object(all_ranks, mine)
        with raise_together():
            self._folder.mkdir(parents=True, exist_ok=True)
            if rank in self._config.profile_ranks:
                followed.export_chrome_trace(str(self._folder / f"rank-{rank}.json.gz"))
                if self._device.type == "cuda":
                    torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-{rank}.pickle"))
            if rank == 0:
                write_text(
                    self._folder / "ranks.json",
                    json.dumps([asdict(each) for each in all_ranks], indent=1) + "\n",
                )
                write_text(self._folder / "ranks.md", table(all_ranks))
        if self._device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)
        say(
            f"profiled iterations {self._begun} to {iteration}, into {self._folder}\n{table(all_ranks)}"
        )


def spent(events: Iterable[Any], rank: int, iterations: int) -> Spent:
    """Return where the time of the events of torch's profiler went.

    On a GPU, compute is its kernels and communication NCCL's; on a CPU, aten's operators and
    gloo's.
    """
    marks: dict[str, list[Interval]] = {DATA: [], SAVING: []}
    operators, kernels, messages = [], [], []
    changes: dict[bool, list[Interval]] = {False: [], True: []}
    for event in events:
        name, span = event.name(), (event.start_ns(), event.start_ns() + event.duration_ns())
        on_gpu = "CUDA" in str(event.device_type())
        if on_gpu and (event.is_user_annotation() or "HtoD" in name or "DtoH" in name):
            # spans that FSDP and the optimizer mark, and copies to and from the host: it may wait
            # in both
            continue
        if name == "[memory]":
            changes[on_gpu].append((span[0], event.nbytes()))
        elif name in marks:
            marks[name] += [span] * (not on_gpu)
        elif name.startswith("gloo:") or (on_gpu and "nccl" in name.lower()):
            messages.append(span)
        elif on_gpu:
            kernels.append(span)
        elif name.startswith("aten::"):
            operators.append(span)
    lengths, (data, saving, compute, sent) = covered(
        [marks[DATA], marks[SAVING], kernels or operators, messages]
    )
    compute, sent = (part & ~(data | saving) for part in (compute, sent))
    ends = [*operators, *kernels, *messages, *marks[DATA], *marks[SAVING]]
    whole = max((end for _, end in ends), default=0) - min((start for start, _ in ends), default=0)
    parts = (compute, sent, sent & ~compute, data, saving)
    seconds = [int(lengths[part].sum()) / 1e9 / iterations for part in parts]
    sizes = (size for _, size in sorted(changes[bool(kernels)], key=lambda change: change[0]))
    memory = max(accumulate(sizes), default=0)
    return Spent(rank, socket.gethostname(), memory, whole / 1e9 / iterations, *seconds)


def covered(kinds: Sequence[Sequence[Interval]]) -> tuple[np.ndarray, np.ndarray]:
    """Cut time at starts and ends; return the pieces' lengths, int64 [N], and which kinds cover
    each, [kinds, N].
    """
    edges = np.unique(
        np.array([edge for spans in kinds for span in spans for edge in span], dtype=np.int64)
    )
    open_now = np.zeros((len(kinds), len(edges)), dtype=np.int64)
    for row, spans in zip(open_now, kinds, strict=True):
        starts, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        np.add.at(row, np.searchsorted(edges, starts), 1)
        np.add.at(row, np.searchsorted(edges, ends), -1)
    return np.diff(edges), open_now.cumsum(1)[:, :-1] > 0


def table(ranks: list[Spent]) -> str:
    """Return the ranks' times in milliseconds and memory as Markdown, and name the one that the
    others wait for.

    In collectives the others wait for the slowest rank: it has the least exposed communication.
    """
    columns = ("compute", "exposed", "communication", "data", "saving", "other", "iteration")
    lines = [
        "| rank | host | " + " | ".join(columns) + " | MB |",
        "| ---: | --- |" + " ---: |" * (len(columns) + 1),
    ]
    for each in ranks:
        lines.append(
            f"| {each.rank} | {each.host} | "
            + " | ".join(f"{1e3 * getattr(each, c):.1f}" for c in columns)
            + f" | {each.memory / 1e6:.1f} |"
        )
    last = max(ranks, key=lambda each: each.iteration - each.exposed)
    busy = statistics.median(each.iteration - each.exposed for each in ranks)
    more = (last.iteration - last.exposed) / busy - 1 if busy else 0.0
    said = f"Slowest: rank {last.rank} on {last.host}, busy {more:.0%} longer than the median."
    return "\n".join([*lines, "", f"Milliseconds per iteration. {said}"]) + "\n"


class Stragglers(Callback):
    """Adds the ranks' times to the record of an interval's last step, and warns of a rank that
    stays behind.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        device: torch.device,
        interval: int,
        seconds: dict[str, float],
    ) -> None:
        """Compare several ranks every ``interval`` iterations.

        ``seconds`` are this rank's in waiting for batches and in updates; they are set back at an
        interval's end.
        """
        self._device, self._interval, self._seconds = device, interval, seconds
        self._steps: list[float] = []
        self._began: Any = None
        self._calls = deque[tuple[Any, Any]](maxlen=CALLS)
        self._behind = deque([-1, -1, -1], maxlen=3)
        """The ranks found behind at the last intervals; -1 for none."""
        layers = [
            layer for part in parts for layer in part.modules() if isinstance(layer, (MLP, SwiGLU))
        ]
        self._layers, self._called = len(layers), 0
        if layers and dist.get_world_size() > 1:
            layers[0].register_forward_pre_hook(lambda *_: self._call(begins=True))
            layers[0].register_forward_hook(lambda *_: self._call(begins=False), prepend=True)

    def _call(self, *, begins: bool) -> None:
        """Note a call's begin or end. A compiled layer keeps no time, which would break its graph."""
        if torch.compiler.is_compiling():
            return
        if begins:
            self._began = self._now()
        else:
            self._calls.append((self._began, self._now()))
            self._called += 1

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def on_step_end(self, step: Step) -> None:
        """Count a step; at an interval's end compare the ranks, with one sum of three numbers of
        each.
        """
        self._steps.append(step.record["iteration_time_ms"])
        size = dist.get_world_size()
        if size == 1 or not (step.last or step.iteration % self._interval == 0):
            return
        table = torch.zeros(size, len(PHASES), dtype=torch.float64)
        mine = [1e3 * seconds / len(self._steps) for seconds in self._seconds.values()]
        cuda = self._device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self._device)
        of_calls = [
            begin.elapsed_time(end) if cuda else 1e3 * (end - begin) for begin, end in self._calls
        ]
        table[dist.get_rank()] = torch.tensor([*mine, statistics.median(of_calls or [0.0])])
        table = table.to(self._device)
        dist.all_reduce(table)
        found = dict(zip(PHASES, table.T.tolist(), strict=True))
        calls = self._layers * self._called / len(self._steps)
        rank, share, phase, least = slowest(found, statistics.median(self._steps), calls)
        self._behind.append(rank if least and share > BEHIND else -1)
        if (before := self._behind)[0] != before[1] == before[2] >= 0:
            its, median = found[phase][rank], statistics.median_low(found[phase])
            where = f"{phase} {its:.4g}, median {median:.4g}"
            store, key = dist.distributed_c10d._get_default_store(), NODE.format(rank)
            host = f" on {store.get(key).decode()}" if store.check([key]) else ""
            say(f"warning: rank {rank}{host} is {share:.0%} behind the median: {where}")
        self._steps.clear()
        self._called = 0
        self._seconds.update(dict.fromkeys(self._seconds, 0.0))
        self._calls.clear()
        step.record |= found | {"slowest_rank": rank, "slowest_behind": share}


def slowest(
    found: dict[str, list[float]], step: float, calls: float
) -> tuple[int, float, str, bool]:
    """Return the rank most behind the median (of two the faster one's), its share, its phase, and
    if by ``LEAST_MS``.

    The layer's time is compared with the median's, what is once in a step with the ``step``: both
    in ms. Of layers a step makes ``calls``. A rank behind by ``LEAST_MS`` goes before those that
    are not.
    """
    shares = []
    for phase, times in found.items():
        middle = statistics.median_low(times)
        whole, often = (middle, calls) if phase == "mlp_ms" else (step, 1)
        behind = [(mine - middle, -rank) for rank, mine in enumerate(times)]
        shares += [
            (ms * often >= LEAST_MS, ms / whole if whole else 0.0, rank, phase)
            for ms, rank in behind
        ]
    least, share, rank, phase = max(shares)
    return -rank, share, phase, least

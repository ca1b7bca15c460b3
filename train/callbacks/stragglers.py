"""Compare the times of all ranks in every logging interval, to find stragglers."""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from model.parts.feed_forward import MLP, SwiGLU
from runtime.processes import NODE
from train.callbacks import Callback, Step, say

PHASES = ("data_ms", "update_ms", "mlp_ms")
"""Fields of a record that list each rank's milliseconds.

The first two are per step: the wait for a batch, and the optimizer's update. The third is per call
of the first feed-forward layer (0 with --compile). No other part of a step can tell ranks apart,
because the ranks wait for each other there, and so all take the same time.
"""
MAX_BEHIND = 0.2
"""Relative delay of a rank, as ``slowest`` defines it, above which the rank counts as slow."""
MIN_BEHIND_MS = 20.0
"""Minimum delay of a rank, in milliseconds per step, to count as slow."""
MAX_CALLS = 64
"""Maximum number of feed-forward calls whose times are kept."""


class Stragglers(Callback):
    """Adds all ranks' times to the records, and warns of a rank that is repeatedly slow.

    One slow GPU or host slows down every rank, because all wait for it in collectives, and a step's
    time alone does not show which one it is. So each rank measures phases without communication.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        device: torch.device,
        interval: int,
        seconds: dict[str, float],
    ) -> None:
        """Compare the ranks every ``interval`` iterations.

        ``seconds`` counts the time that this rank waits for batches and spends in updates; it is
        reset at the end of each interval.
        """
        self._device = device
        self._interval = interval
        self._seconds = seconds
        self._step_times: list[float] = []
        self._call_start: Any = None
        self._calls = deque[tuple[Any, Any]](maxlen=MAX_CALLS)
        self._behind = deque([-1, -1, -1], maxlen=3)
        """The slow rank of each of the last three intervals; -1 if there was none."""

        layers = [
            layer for part in parts for layer in part.modules() if isinstance(layer, (MLP, SwiGLU))
        ]
        self._num_layers = len(layers)
        self._num_calls = 0
        if layers and dist.get_world_size() > 1:
            layers[0].register_forward_pre_hook(lambda *_: self._on_call(begins=True))
            layers[0].register_forward_hook(lambda *_: self._on_call(begins=False), prepend=True)

    def _on_call(self, *, begins: bool) -> None:
        """Record a call's start or end; not under torch.compile, whose graph it would break."""
        if torch.compiler.is_compiling():
            return
        if begins:
            self._call_start = self._now()
        else:
            self._calls.append((self._call_start, self._now()))
            self._num_calls += 1

    def _now(self) -> Any:
        """Return the time on a CPU, or an event in the GPU's stream, which avoids a wait."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def on_step_end(self, step: Step) -> None:
        """Count a step; at the end of an interval compare the ranks by one small all-reduce."""
        self._step_times.append(step.record["iteration_time_ms"])
        world_size = dist.get_world_size()
        is_due = step.last or step.iteration % self._interval == 0
        if world_size == 1 or not is_due:
            return

        times = self._gathered_times(world_size)
        calls_per_step = self._num_layers * self._num_calls / len(self._step_times)
        median_step = statistics.median(self._step_times)
        rank, share, phase, is_far_behind = slowest(times, median_step, calls_per_step)
        self._behind.append(rank if is_far_behind and share > MAX_BEHIND else -1)
        self._warn(times, rank, share, phase)

        self._step_times.clear()
        self._num_calls = 0
        self._seconds.update(dict.fromkeys(self._seconds, 0.0))
        self._calls.clear()
        step.record |= times | {"slowest_rank": rank, "slowest_behind": share}

    def _gathered_times(self, world_size: int) -> dict[str, list[float]]:
        """Return each phase's milliseconds as a list over ranks; collective."""
        num_steps = len(self._step_times)
        local_times = [1e3 * seconds / num_steps for seconds in self._seconds.values()]
        local_times.append(statistics.median(self._call_times() or [0.0]))

        # Each rank fills its row, and the sum is the whole table.
        table = torch.zeros(world_size, len(PHASES), dtype=torch.float64)  # [ranks, phases]
        table[dist.get_rank()] = torch.tensor(local_times)
        table = table.to(self._device)
        dist.all_reduce(table)
        return dict(zip(PHASES, table.T.tolist(), strict=True))

    def _call_times(self) -> list[float]:
        """Return the milliseconds of each recorded call of the first feed-forward layer."""
        if self._device.type != "cuda":
            return [1e3 * (end - start) for start, end in self._calls]
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) for start, end in self._calls]

    def _warn(self, times: dict[str, list[float]], rank: int, share: float, phase: str) -> None:
        """Warn once of a rank that was too slow in two intervals in a row."""
        before, previous, current = self._behind
        if current < 0 or previous != current or before == current:
            return
        rank_time = times[phase][rank]
        median = statistics.median_low(times[phase])
        store = dist.distributed_c10d._get_default_store()
        key = NODE.format(rank)
        host = f" on {store.get(key).decode()}" if store.check([key]) else ""
        say(
            f"warning: rank {rank}{host} is {share:.0%} behind the median: "
            f"{phase} {rank_time:.4g}, median {median:.4g}"
        )


def slowest(
    times: dict[str, list[float]], step_ms: float, calls_per_step: float
) -> tuple[int, float, str, bool]:
    """Return the slowest rank, its relative delay, its phase, and True if it is far behind.

    The delay is the rank's time minus the median. It is relative to the median if the phase is a
    layer's call, else to the whole step. The median of two ranks is the faster one's time. A rank
    is far behind if it loses ``MIN_BEHIND_MS`` per step; such ranks are preferred to others.

    Args:
        times: each phase's milliseconds as a list over ranks.
        step_ms: duration of a step in milliseconds.
        calls_per_step: number of feed-forward calls in a step.
    """
    candidates = []
    for phase, phase_times in times.items():
        median = statistics.median_low(phase_times)
        reference = step_ms
        repeats = 1.0
        if phase == "mlp_ms":
            reference = median
            repeats = calls_per_step
        for rank, rank_time in enumerate(phase_times):
            behind = rank_time - median
            share = behind / reference if reference else 0.0
            # Ranks are negated, so that max() returns the first of several equally slow ones.
            candidates.append((behind * repeats >= MIN_BEHIND_MS, share, -rank, phase))
    is_far_behind, share, negative_rank, phase = max(candidates)
    return -negative_rank, share, phase, is_far_behind

"""Stragglers: the time that each rank spends where it waits for no other, compared every logging interval."""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from model.layers import MLP, SwiGLU
from runtime.processes import NODE
from train.watching.moments import Step, Watcher, say

PHASES = ("data_ms", "update_ms", "mlp_ms")
"""Fields of a record with a list by rank: per step, waiting for a batch and the optimizer's update; per call, the first
feed-forward layer (0 with --compile). Elsewhere in a step ranks wait for each other, so all take the same time."""
BEHIND, LEAST_MS = 0.2, 20.0
"""A rank is warned of that is behind by more than this share, and by at least these ms in a step."""
CALLS = 64


class Stragglers(Watcher):
    """Adds the ranks' times to the record of an interval's last step, and warns of a rank that stays behind."""

    def __init__(
        self, parts: Sequence[nn.Module], device: torch.device, interval: int, seconds: dict[str, float]
    ) -> None:
        """Compare several ranks every ``interval`` iterations.

        ``seconds`` are this rank's in waiting for batches and in updates; they are set back at an interval's end.
        """
        self._device, self._interval, self._seconds = device, interval, seconds
        self._steps: list[float] = []
        self._began: Any = None
        self._calls = deque[tuple[Any, Any]](maxlen=CALLS)
        self._behind = deque([-1, -1, -1], maxlen=3)
        """The ranks found behind at the last intervals; -1 for none."""
        layers = [layer for part in parts for layer in part.modules() if isinstance(layer, (MLP, SwiGLU))]
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

    def after(self, step: Step) -> None:
        """Count a step; at an interval's end compare the ranks, with one sum of three numbers of each."""
        self._steps.append(step.record["iteration_time_ms"])
        size = dist.get_world_size()
        if size == 1 or not (step.last or step.iteration % self._interval == 0):
            return
        table = torch.zeros(size, len(PHASES), dtype=torch.float64)
        mine = [1e3 * seconds / len(self._steps) for seconds in self._seconds.values()]
        cuda = self._device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self._device)
        of_calls = [begin.elapsed_time(end) if cuda else 1e3 * (end - begin) for begin, end in self._calls]
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


def slowest(found: dict[str, list[float]], step: float, calls: float) -> tuple[int, float, str, bool]:
    """Return the rank most behind the median (of two the faster one's), its share, its phase, and if by ``LEAST_MS``.

    The layer's time is compared with the median's, what is once in a step with the ``step``: both in ms. Of layers a
    step makes ``calls``. A rank behind by ``LEAST_MS`` goes before those that are not.
    """
    shares = []
    for phase, times in found.items():
        middle = statistics.median_low(times)
        whole, often = (middle, calls) if phase == "mlp_ms" else (step, 1)
        behind = [(mine - middle, -rank) for rank, mine in enumerate(times)]
        shares += [(ms * often >= LEAST_MS, ms / whole if whole else 0.0, rank, phase) for ms, rank in behind]
    least, share, rank, phase = max(shares)
    return -rank, share, phase, least

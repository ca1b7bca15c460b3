"""The moments of training: one small interface of what stands beside the step, listed in the order of the calls."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.profiler import record_function

from data.loader import Batch
from runtime.together import is_first

DATA, UPDATE, SAVING = "longmesh: data", "longmesh: update", "longmesh: saving"
"""Parts of a step whose time is taken apart: the wait for a batch, the optimizer's update, a save."""


@dataclass
class Step:
    """A finished step, as the moments after it see it."""

    micro_batches: list[Batch]
    valid: int
    """All ranks' tokens with loss in them."""
    loss: float
    """Their mean before the update."""
    record: dict[str, Any]
    """A record of metrics.jsonl; moments add to it."""
    wait: Callable[[], None]
    """Waits until the next step's batch is made, so that no thread runs while processes are forked."""
    last: bool
    """True if the run ends after it."""

    @property
    def iteration(self) -> int:
        """Its number; the first is 1."""
        return int(self.record["iteration"])


class Watcher:
    """Something that stands beside the training step. All ranks call its moments together: each may be collective."""

    def begin(self, iteration: int) -> None:
        """Act before the first step of this start, which goes on from ``iteration``."""

    def before(self, iteration: int) -> None:
        """Act before an iteration takes its batch."""

    def ask(self) -> Sequence[bool]:
        """Return flags of this rank, which travel with the count of a batch's tokens: always equally many."""
        return ()

    def hear(self, counts: Sequence[int]) -> bool:
        """Take how many ranks set each flag; return whether the run is to end before this batch."""
        return False

    def judge(self, loss: float, norm: float) -> str:
        """Say why a step is bad, before its update, which is then left out; empty if it is good."""
        return ""

    def after(self, step: Step) -> None:
        """Act after an iteration's update."""

    def end(self, iteration: int) -> None:
        """Act after the last step of this start, ``iteration``."""


class Watchers:
    """Calls the moments of those that take part in them, in their order."""

    def __init__(self, *watchers: Watcher) -> None:
        """Watchers that ask must hear, and those that hear must ask."""
        self._watchers = watchers
        self._flags: list[int] = []
        """The number of flags that each had when they were last asked."""

    def call(self, moment: str, *of: Any) -> list[Any]:
        """Call a moment of all that have one of their own; return their answers."""
        own = (one for one in self._watchers if getattr(type(one), moment) is not getattr(Watcher, moment))
        return [getattr(one, moment)(*of) for one in own]

    def judge(self, loss: float, norm: float) -> str:
        """Return the first reason why a step is bad; empty if it is good."""
        return next(filter(None, self.call("judge", loss, norm)), "")

    def ask(self) -> list[bool]:
        """Return the flags of all, one after the other."""
        asked = self.call("ask")
        self._flags = [len(flags) for flags in asked]
        return [flag for flags in asked for flag in flags]

    def hear(self, counts: Sequence[int]) -> bool:
        """Give those that asked their counts; return whether one of them ends the run."""
        left, ends = iter(counts), False
        hearing = (one for one in self._watchers if type(one).hear is not Watcher.hear)
        for one, flags in zip(hearing, self._flags, strict=True):
            ends |= one.hear([*islice(left, flags)])
        return ends


class Clock:
    """The time that this rank spends in parts of steps."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((DATA, UPDATE), 0.0)
        """Since the ranks compared them."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Mark a block as ``DATA``, ``UPDATE`` or ``SAVING`` for torch's profiler, and add its time to ``seconds``."""
        start = time.perf_counter()
        try:
            with record_function(name):
                yield
        finally:
            if name in self.seconds:
                self.seconds[name] += time.perf_counter() - start


def say(line: str) -> None:
    """Print a line on the first rank."""
    if is_first():
        print(line, flush=True)

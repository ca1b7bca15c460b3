"""Requests to stop: a run ends before its last iteration at a signal or at a time, agreed on by all ranks."""

import time
from collections.abc import Sequence

import torch.distributed as dist

from runtime.signals import ASKING, StopRequest
from runtime.together import is_first
from train.watching.moments import Step, Watcher


class StopAgreement(Watcher):
    """Ends the run before the next step once a rank is asked to stop, or the run's time is over."""

    def __init__(self, request: StopRequest, minutes: float | None) -> None:
        """``minutes`` since the process began are the run's time; None is no limit."""
        self._request, self._minutes = request, minutes
        self._sums = [0] * (len(ASKING) + 1)
        self._worked = False
        """True once a step is done. Before, no time is over: a run too slow to start would go in circles."""

    @property
    def agreed(self) -> bool:
        """True once all ranks know that the run ends early."""
        return any(self._sums)

    def ask(self) -> Sequence[bool]:
        """Return what asks this rank to stop: each signal of ASKING, and time, by the first rank's clock."""
        over = self._minutes is not None and time.monotonic() - self._request.started > 60 * self._minutes
        return [*(self._request.signal is number for number in ASKING), over and self._worked and is_first()]

    def hear(self, counts: Sequence[int]) -> bool:
        """Take how many ranks each asks to stop."""
        self._sums = list(counts)
        return self.agreed

    def after(self, step: Step) -> None:
        """Note that this start has done a step."""
        self._worked = True

    def why(self) -> str:
        """Say which signals came to how many processes, and whether the time is over."""
        *signals, over = self._sums
        size = dist.get_world_size()
        came = [f"{number.name} to {of} of {size} processes" for number, of in zip(ASKING, signals, strict=True) if of]
        return ", ".join(came + [f"exit_duration_in_mins {self._minutes} are over"] * bool(over))

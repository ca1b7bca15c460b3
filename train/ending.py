"""When a run ends before its last iteration: at a signal or at a time, agreed on by all ranks."""

import time

import torch.distributed as dist

from runtime.signals import ASKING, Notice
from runtime.together import is_first


class Ending:
    """Whether the run is to end early. Ranks add up their ``flags`` in a reduction that a step makes in any case."""

    def __init__(self, notice: Notice, minutes: float | None) -> None:
        """``minutes`` since the process began are the run's time; None is no limit."""
        self._notice = notice
        self._minutes = minutes
        self._sums = [0] * (len(ASKING) + 1)

    @property
    def agreed(self) -> bool:
        """Whether all ranks know that the run ends early."""
        return any(self._sums)

    def flags(self, worked: bool) -> list[bool]:
        """Return what asks this rank to end: each signal of ASKING, and time, by the first rank's clock.

        Args:
            worked: whether a step is done. Before that no time is over: a run that takes longer to start than its limit
                would go in circles.
        """
        over = self._minutes is not None and time.monotonic() - self._notice.started > 60 * self._minutes
        return [*(self._notice.signal is number for number in ASKING), over and worked and is_first()]

    def agree(self, sums: list[int]) -> None:
        """Take the sums of all ranks' ``flags``."""
        self._sums = sums

    def why(self) -> str:
        """Say which signals came to how many processes, and whether the time is over."""
        *signals, over = self._sums
        size = dist.get_world_size()
        came = [f"{number.name} to {of} of {size} processes" for number, of in zip(ASKING, signals, strict=True) if of]
        return ", ".join(came + [f"exit_duration_in_mins {self._minutes} are over"] * bool(over))

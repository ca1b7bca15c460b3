"""The watchdog hears of every step: if none comes for long, it ends all ranks."""

from collections.abc import Sequence

from runtime.watchdog import Watchdog
from train.watching.moments import Step, Watcher


class Heartbeat(Watcher):
    """Tells a rank's watchdog that the ranks have met, and how long each step took."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def ask(self) -> Sequence[bool]:
        """Ask for nothing, but hear."""
        return ()

    def hear(self, counts: Sequence[int]) -> bool:
        """Take that all ranks have come this far."""
        self._watchdog.beat()
        return False

    def after(self, step: Step) -> None:
        """Take the time of a step, by which the watchdog waits for the next."""
        self._watchdog.beat(step.record["iteration_time_ms"] / 1e3)

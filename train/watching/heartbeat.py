"""The watchdog's heartbeat: told of every step, it ends all ranks if no other comes for long."""

from runtime.watchdog import Watchdog
from train.watching.moments import Step, Watcher


class Heartbeat(Watcher):
    """Tells a rank's watchdog how long each step took."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def after(self, step: Step) -> None:
        """Tell that a step is made, and its seconds, by which the next is waited for."""
        self._watchdog.beat(step.record["iteration_time_ms"] / 1e3)

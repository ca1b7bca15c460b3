"""Callbacks act beside the training step, at four moments of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data.loader import Batch
from runtime.together import is_first

DATA, UPDATE, SAVING = "longmesh: data", "longmesh: update", "longmesh: saving"
"""Parts of a step whose time is taken apart: the wait for a batch, the optimizer's update, a save.
"""


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
    """Waits until the next step's batch is made, so that no thread runs while processes are forked.
    """
    last: bool
    """True if the run ends after it."""

    @property
    def iteration(self) -> int:
        """Its number; the first is 1."""
        return int(self.record["iteration"])


class Callback:
    """Acts beside the training step. All ranks call its moments together: each may be collective."""

    def on_train_begin(self, iteration: int) -> None:
        """Act before the first step of this start, which goes on from ``iteration``."""

    def on_step_begin(self, iteration: int) -> None:
        """Act before an iteration takes its batch."""

    def on_step_end(self, step: Step) -> None:
        """Act after an iteration's update."""

    def on_train_end(self, iteration: int) -> None:
        """Act after the last step of this start, ``iteration``."""


def say(line: str) -> None:
    """Print a line on the first rank."""
    if is_first():
        print(line, flush=True)

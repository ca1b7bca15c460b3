"""Callbacks act between training steps, at four moments of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data.loader import Batch
from runtime.together import is_first

DATA = "longmesh: data"
"""Name, in profiles, of the phase in which a rank waits for its batch."""
UPDATE = "longmesh: update"
"""Name of the phase in which the optimizer updates the weights."""
SAVING = "longmesh: saving"
"""Name of the phase in which a checkpoint is saved."""


@dataclass
class Step:
    """A finished training step, as callbacks receive it."""

    micro_batches: list[Batch]
    valid: int
    """Number of tokens with a loss, on all ranks together."""
    loss: float
    """Mean loss over the tokens with a loss, before the update."""
    record: dict[str, Any]
    """The step's record in metrics.jsonl; callbacks add fields to it."""
    wait: Callable[[], None]
    """Waits until the next batch is ready, so that no thread runs while processes are forked."""
    last: bool
    """True if the run ends after this step."""

    @property
    def iteration(self) -> int:
        """The iteration's number; the first is 1."""
        return int(self.record["iteration"])


class Callback:
    """Acts between training steps; a base class.

    All ranks call its methods together, so they may be collective.
    """

    def on_train_begin(self, iteration: int) -> None:
        """Act before the first step; ``iteration`` is the last completed one, 0 in a new run."""

    def on_step_begin(self, iteration: int) -> None:
        """Act before an iteration takes its batch."""

    def on_step_end(self, step: Step) -> None:
        """Act after an iteration's update."""

    def on_train_end(self, iteration: int) -> None:
        """Act after the last step of this start; ``iteration`` is that step's number."""


def say(line: str) -> None:
    """Print a line on the first rank."""
    if is_first():
        print(line, flush=True)

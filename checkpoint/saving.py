"""The saves of a run, and which of them are kept."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from checkpoint.api import CheckpointConfig, save_checkpoint
from checkpoint.keeping import Keeper


@dataclass(kw_only=True)
class Saves:
    """What a run saves, and where."""

    config: CheckpointConfig
    say: Callable[[str], None]
    """Prints a line on the first rank."""

    def save(self, iteration: int, *run: Any, **state: Any) -> None:
        """Write a checkpoint into the run's folder, as ``save_checkpoint`` does; remove older ones; collective."""
        folder = Path(str(self.config.save))
        path = save_checkpoint(folder, iteration, *run, **state)
        self.say(f"saved {path}")
        self._keeper.verified.add(path)
        self._keeper.prune(folder)

    @cached_property
    def _keeper(self) -> Keeper:
        return Keeper(last=self.config.keep_last, every=self.config.keep_every)

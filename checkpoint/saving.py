"""The saves of a run, and which of them are kept."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from checkpoint.api import CheckpointConfig, save_checkpoint
from checkpoint.keeping import Keeper

if TYPE_CHECKING:
    from checkpoint.background import Background


@dataclass(kw_only=True)
class Saves:
    """What a run saves, and where."""

    config: CheckpointConfig
    say: Callable[[str], None]
    """Prints a line on the first rank."""

    def save(self, iteration: int, *run: Any, **state: Any) -> None:
        """Write a checkpoint into the run's folder, as ``save_checkpoint`` does; remove older ones; collective.

        With async_save it is begun, once the one before is over.
        """
        folder = Path(str(self.config.save))
        self.wait()
        if self._background is not None:
            save_checkpoint(folder, iteration, *run, **state, beside=self._background)
            return
        path = save_checkpoint(folder, iteration, *run, **state)
        self._tell(path)
        self._keeper.verified.add(path)
        self._keeper.prune(folder)

    @property
    def ready(self) -> bool:
        """Whether a save is under way whose next step awaits the other ranks alone."""
        return self._background is not None and self._background.ready

    def agree(self, ready: int) -> None:
        """Go on with the save under way if so many ranks, all of them, are ``ready``; collective.

        Raises:
            CheckpointError: it could not be written, on every rank.
        """
        if self._background is not None and ready == dist.get_world_size():
            self._tell(self._background.step())

    def wait(self) -> None:
        """Wait until no save is under way; collective. Raises as ``agree`` does."""
        if self._background is not None:
            self._tell(self._background.wait())

    def _tell(self, finished: Path | None) -> None:
        if finished is not None:
            self.say(f"saved {finished}")

    @cached_property
    def _background(self) -> "Background | None":
        if not self.config.async_save:
            return None
        from checkpoint.background import Background  # imports DCP, which takes half a second

        return Background(self._keeper)

    @cached_property
    def _keeper(self) -> Keeper:
        return Keeper(last=self.config.keep_last, every=self.config.keep_every)

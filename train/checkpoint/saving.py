"""The saves of a run, which of them are kept, and the one that it goes on from."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from runtime.together import from_first, gather_results, is_first, on_all_ranks
from train.checkpoint.api import CheckpointConfig, save_checkpoint
from train.checkpoint.drafts import Background
from train.checkpoint.manifest import checkpoint_folder, local_folder, remove_others
from train.checkpoint.search import Keeper, find_checkpoint, to_stderr


def newest_checkpoint(
    config: CheckpointConfig, report: Callable[[str], None] = to_stderr
) -> Path | None:
    """Do as ``find_checkpoint`` does of ``--load`` and its run's local checkpoints.

    Local ones that are not taken are removed: the run that goes on makes others of their
    iterations.
    """
    load, save = str(config.load), config.save
    same = (
        save is not None
        and os.path.realpath(save) == os.path.realpath(load)
        and not config.finetune
    )
    local = local_folder(config.non_persistent_local_ckpt_dir, load) if same else None
    path = find_checkpoint(load, config.ckpt_step, report=report, local=local)
    if local is not None:
        there = gather_results(
            lambda: {path.parent for path in local.parent.glob("*-????????????/iter_*")}
        )
        others = {str(folder) for folder in set[Path]().union(*there) if folder.name != local.name}
        for other in sorted(others) if is_first() else ():
            report(f"passed over {other}, which is of another run; remove it if that one is over")
        remove_others(local, path)
    return path


@dataclass(kw_only=True)
class Saves:
    """Checkpoints of a run, in their folders."""

    config: CheckpointConfig
    say: Callable[[str], None]
    """Prints a line on the first rank."""
    _owed: set[str] = field(default_factory=set, init=False)
    """The tiers, shared or local, whose interval has come since the last save."""

    def __post_init__(self) -> None:
        self._keeper = Keeper(last=self.config.keep_last, every=self.config.keep_every)
        self._background = Background(self._keeper)

    def due(self, iteration: int, last: bool) -> Literal["shared", "local"] | None:
        """Return which tier is to have a checkpoint of this iteration: a local one waits while a
        save is under way.
        """
        intervals = {
            "shared": self.config.save_interval,
            "local": self.config.non_persistent_save_interval,
        }
        self._owed |= {
            tier
            for tier, every in intervals.items()
            if every is not None and iteration % every == 0
        }
        if self.config.save is not None and (last or "shared" in self._owed):
            return "shared"
        return "local" if "local" in self._owed and not self._background.under_way else None

    def save(
        self, tier: Literal["shared", "local"], iteration: int, *run: Any, **state: Any
    ) -> None:
        """Write a checkpoint into a tier's folder, as ``save_checkpoint`` does; remove older ones;
        collective.

        With async_save it is begun, once the one before is over.
        """
        self.wait()
        folder = self._local if tier == "local" else Path(str(self.config.save))
        assert folder is not None
        beside = self._background if self.config.async_save else None
        path = save_checkpoint(
            folder, iteration, *run, **state, beside=beside, local=tier == "local"
        )
        if beside is None:
            self._tell(path)
            if tier == "shared":
                self._keeper.prune_after(path)

    def holds(self, iteration: int) -> bool:
        """Return whether ``--save`` has a checkpoint of this iteration; collective."""
        return from_first(checkpoint_folder(str(self.config.save), iteration).is_dir)

    def end(self, iteration: int) -> None:
        """Wait as ``wait`` does, and remove the local checkpoints if there is a shared one of the
        end; collective.
        """
        self.wait()
        if self._local is not None and self.holds(iteration):
            remove_others(self._local, None)

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Let a block end with an error that all ranks raise only when the save under way is over.

        Where a rank fails alone, none waits: its peers may never come.
        """
        try:
            yield
        except Exception as error:
            if on_all_ranks(error) and self._background.under_way:
                self.say(f"the run ends when the save under way is over: {error}")
                self.wait()
            raise

    @property
    def ready(self) -> bool:
        """Return whether a save is under way whose next step awaits the other ranks alone."""
        return self._background.ready

    def agree(self, ready: int) -> None:
        """Go on with the save under way if so many ranks, all of them, are ``ready``; collective.

        Raises CheckpointError: it could not be written, on every rank.
        """
        if ready == dist.get_world_size():
            self._tell(self._background.step())

    def wait(self) -> None:
        """Wait until no save is under way, and none is due; collective. Raises as ``agree`` does."""
        self._owed.clear()
        self._tell(self._background.wait())

    def _tell(self, finished: Path | None) -> None:
        if finished is not None:
            self.say(f"saved {finished}")

    @cached_property
    def _local(self) -> Path | None:
        return local_folder(self.config.non_persistent_local_ckpt_dir, str(self.config.save))

"""Decide when a run saves, which checkpoints it keeps, and which one it resumes from."""

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
from train.checkpoint.local import local_folder, remove_others
from train.checkpoint.manifest import checkpoint_folder
from train.checkpoint.search import Keeper, find_checkpoint, to_stderr


def newest_checkpoint(
    config: CheckpointConfig, report: Callable[[str], None] = to_stderr
) -> Path | None:
    """Return the newest whole checkpoint, in ``--load`` or among its run's local checkpoints.

    Collective; see ``find_checkpoint``. Local checkpoints that are not used are removed, since the
    resumed run writes its own for their iterations.
    """
    load = str(config.load)
    resumes = config.save is not None and not config.finetune
    local = None
    if resumes and os.path.realpath(str(config.save)) == os.path.realpath(load):
        local = local_folder(config.non_persistent_local_ckpt_dir, load)
    path = find_checkpoint(load, config.ckpt_step, report=report, local=local)
    if local is None:
        return path

    directory = local.parent

    def folders_of_runs() -> set[Path]:
        return {path.parent for path in directory.glob("*-????????????/iter_*")}

    folders = set[Path]().union(*gather_results(folders_of_runs))
    if is_first():
        for folder in sorted(map(str, folders)):
            if Path(folder).name != local.name:
                report(
                    f"passed over {folder}, which belongs to another run; remove it if that run is "
                    "over"
                )
    remove_others(local, path)
    return path


@dataclass(kw_only=True)
class Saves:
    """Saves a run's checkpoints in two tiers: its shared folder, and a local one on each node."""

    config: CheckpointConfig
    say: Callable[[str], None]
    """Prints a line on the first rank."""
    _due_tiers: set[str] = field(default_factory=set, init=False)
    """Tiers, "shared" or "local", that have become due since the last save."""

    def __post_init__(self) -> None:
        self._keeper = Keeper(last=self.config.keep_last, every=self.config.keep_every)
        self._background = Background(self._keeper)

    def due(self, iteration: int, last: bool) -> Literal["shared", "local"] | None:
        """Return the tier that gets a checkpoint of this iteration, if any.

        A local checkpoint waits while a save is under way.
        """
        intervals = {
            "shared": self.config.save_interval,
            "local": self.config.non_persistent_save_interval,
        }
        for tier, interval in intervals.items():
            if interval is not None and iteration % interval == 0:
                self._due_tiers.add(tier)

        if self.config.save is not None and (last or "shared" in self._due_tiers):
            return "shared"
        if "local" in self._due_tiers and not self._background.under_way:
            return "local"
        return None

    def save(
        self, tier: Literal["shared", "local"], iteration: int, *run: Any, **state: Any
    ) -> None:
        """Write a checkpoint into a tier's folder, and remove older ones. Collective.

        Takes the arguments of ``save_checkpoint``. With async_save it waits for the previous save,
        then writes in the background while training goes on.
        """
        self.wait()
        folder = self._local if tier == "local" else Path(str(self.config.save))
        assert folder is not None
        background = self._background if self.config.async_save else None
        path = save_checkpoint(
            folder, iteration, *run, **state, background=background, local=tier == "local"
        )
        if background is None:
            self._print_saved(path)
            if tier == "shared":
                self._keeper.prune_after(path)

    def holds(self, iteration: int) -> bool:
        """Return True if ``--save`` has a checkpoint of this iteration. Collective."""
        return from_first(checkpoint_folder(str(self.config.save), iteration).is_dir)

    def end(self, iteration: int) -> None:
        """Wait for the save under way, and remove local checkpoints if a shared one is as new.

        Collective.
        """
        self.wait()
        if self._local is not None and self.holds(iteration):
            remove_others(self._local, None)

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Finish the save under way before a block ends with an error that all ranks raise.

        If only one rank fails, it does not wait, since its peers may never come.
        """
        try:
            yield
        except Exception as error:
            if on_all_ranks(error) and self._background.under_way:
                self.say(
                    "the run ends once the save in progress is finished, because of an error: "
                    f"{error}"
                )
                self.wait()
            raise

    @property
    def ready(self) -> bool:
        """True if a save is under way and this rank has finished its current step."""
        return self._background.ready

    def agree(self, ready: int) -> None:
        """Take the next step of the save under way if all ranks are ``ready``. Collective.

        ``ready`` is the number of ready ranks. Raises CheckpointError on every rank if the
        checkpoint could not be written.
        """
        if ready == dist.get_world_size():
            self._print_saved(self._background.step())

    def wait(self) -> None:
        """Wait until no save is under way or due. Collective; raises the errors of ``agree``."""
        self._due_tiers.clear()
        self._print_saved(self._background.wait())

    def _print_saved(self, path: Path | None) -> None:
        if path is not None:
            self.say(f"saved {path}")

    @cached_property
    def _local(self) -> Path | None:
        return local_folder(self.config.non_persistent_local_ckpt_dir, str(self.config.save))

"""Which checkpoints of a run stay on the disk: the newest whole ones, and one in so many iterations."""

import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from checkpoint.manifest import checkpoint_folder
from checkpoint.search import saved_iterations, to_stderr, what_is_broken
from runtime.together import from_first


@dataclass(kw_only=True)
class Keeper:
    """Removes the checkpoints of one folder that nobody needs any more."""

    last: int | None
    """How many of the newest whole ones stay; None keeps all, or one where ``every`` is given."""
    every: int | None
    """Those whose iterations this divides stay too."""
    report: Callable[[str], None] = to_stderr
    verified: set[Path] = field(default_factory=set)
    """Checkpoints whose bytes were hashed by this process: later a look at their sizes is enough."""

    def prune(self, directory: Path, group: dist.ProcessGroup | None = None) -> None:
        """Remove what is older than the newest whole ones; collective over ``group``.

        A broken one counts for nothing, and stays until it is older than the whole ones that count. A folder that
        cannot be removed is reported, and tried again next time.
        """
        if self.last is None and self.every is None:
            return
        wanted = self.last or 1
        for iteration in from_first(lambda: saved_iterations(directory), group):
            folder = checkpoint_folder(directory, iteration)
            if wanted:
                wanted -= self._is_whole(folder, group)
            elif self.every is None or iteration % self.every:
                from_first(lambda folder=folder: self._remove(folder), group)  # type: ignore[misc]

    def prune_after(self, newest: Path) -> "Keeper":
        """Prune as one is written, whose bytes were hashed, and return this object, for another process."""
        self.verified.add(newest)
        self.prune(newest.parent)
        return self

    def _is_whole(self, folder: Path, group: dist.ProcessGroup | None) -> bool:
        known = from_first(lambda: folder in self.verified, group)
        if problem := what_is_broken(folder, group, read=not known):
            from_first(lambda: self.report(f"not counted among those kept: {problem}"), group)
            return False
        self.verified.add(folder)
        return True

    def _remove(self, folder: Path) -> None:
        # Renamed first: what a kill leaves is a draft, not a broken checkpoint.
        draft = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            folder.rename(draft)
            shutil.rmtree(draft)
        except OSError as error:
            self.report(f"cannot remove {folder}, which is older than those to keep: {error.strerror}")

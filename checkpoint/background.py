"""Saves that are written while training goes on.

DCP's own ``async_save`` does not fit: it meets in a process group of its own, whose collectives wait for a lost rank's
timeout, and training learns of an error neither at one step on all ranks nor by the file's name. Here training copies
its tensors, and a thread of each rank writes the copies.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from checkpoint.drafts import Draft, Steps, removed_on_error
from checkpoint.search import Keeper
from checkpoint.tensors import Copies
from runtime.together import gather_results, work_alone


class Background:
    """One save at a time, in steps, each of which is work of every rank's thread.

    A step is taken when the one before is done on all ranks, which the caller finds out: it adds up ``ready`` in a
    reduction that it makes anyway. So no collective runs beside training, and errors come up on all ranks together.
    """

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.memory: Copies = {}
        self._thread = ThreadPoolExecutor(1, "checkpoints", initializer=work_alone)
        self._save: tuple[Draft, Steps, Future[Any]] | None = None

    def begin(self, draft: Draft, steps: Steps) -> None:
        """Begin to write a draft from ``memory``; none may be under way."""
        self._save = draft, steps, self._thread.submit(next(steps))

    @property
    def under_way(self) -> bool:
        """Return whether a save is not over yet; alike on all ranks."""
        return self._save is not None

    @property
    def ready(self) -> bool:
        """Return whether a save is under way, and this rank is done with its step."""
        return self._save is not None and self._save[2].done()

    def step(self) -> Path | None:
        """Take the next step, as all ranks are ``ready``; return the checkpoint after the last one. Collective.

        Raises CheckpointError: it could not be written, on every rank.
        """
        assert self._save is not None
        (draft, steps, work), self._save = self._save, None  # none is under way after an error
        with removed_on_error(draft.made):
            done = gather_results(work.result)
            try:
                self._save = draft, steps, self._thread.submit(steps.send(done))
            except StopIteration:
                return draft.folder
        return None

    def wait(self) -> Path | None:
        """Take all steps that are left; return the checkpoint if one is published. Collective, raises as ``step``."""
        found = None
        while self._save is not None:
            # Asked again and again: no collective waits for long, however slow the disk is.
            wait([self._save[2]], timeout=1.0)
            if all(gather_results(lambda: self.ready)):
                found = self.step() or found
        return found

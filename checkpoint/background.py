"""Saves that are written while training goes on.

DCP's own ``async_save`` in processes does not fit: these meet in a process group of their own, whose collectives wait
for a lost one's timeout, and training learns of an error neither at one step on all ranks nor by the file's name. Here
DCP writes into memory, as into files, and a process of each rank copies these to the disk.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from torch.distributed.checkpoint.filesystem import FileSystem

from checkpoint.drafts import Draft, disk_errors, publish, removed_on_error
from checkpoint.keeping import Keeper
from checkpoint.local import remove_others
from runtime.beside import Beside
from runtime.files import copy_files
from runtime.together import cpu_group, gather_results


class Memory(FileSystem):
    """Files in memory, which go with this process; they are written over, so that memory is the same at every save."""

    def __init__(self) -> None:
        self.handles: dict[str, int] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file from its beginning."""
        name = Path(path).name
        handle = self.handles.setdefault(name, -1)
        if handle < 0:
            handle = self.handles[name] = os.memfd_create(name)
        with os.fdopen(os.dup(handle), mode) as stream:
            stream.seek(0)
            yield cast(io.IOBase, stream)
        os.ftruncate(handle, os.lseek(handle, 0, os.SEEK_CUR))

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name; the one that had it is gone."""
        if (old := self.handles.get(Path(new_path).name)) is not None:
            os.close(old)
        self.handles[Path(new_path).name] = self.handles.pop(Path(path).name)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Say that nothing is in the way."""
        return False

    def paths(self) -> dict[str, str]:
        """Return where other processes of this user can open each file."""
        return {name: f"/proc/{os.getpid()}/fd/{handle}" for name, handle in self.handles.items()}


class Background:
    """One save at a time, in three steps: each rank's process copies, then the draft's owner's publishes, and prunes.

    A step is taken when the one before is done on all ranks, which the caller finds out: it adds up ``ready`` in a
    reduction that it makes anyway. So no collective runs beside training, and errors come up on all ranks together.
    """

    def __init__(self, keeper: Keeper) -> None:
        self.memory = Memory()
        self._keeper = keeper
        self._beside = Beside("writes checkpoints")
        self._draft: Draft | None = None
        self._step: Literal["copy", "publish", "prune"] = "copy"

    def begin(self, draft: Draft) -> None:
        """Begin to write a draft from ``memory``; none may be under way."""
        self._draft, self._step = draft, "copy"
        self._beside.begin(partial(copy_files, self.memory.paths(), draft.path))

    @property
    def under_way(self) -> bool:
        """Whether a save is not over yet; alike on all ranks."""
        return self._draft is not None

    @property
    def ready(self) -> bool:
        """Whether a save is under way, and this rank is done with its step."""
        return self.under_way and self._beside.done()

    def step(self) -> Path | None:
        """Take the next step, as all ranks are ``ready``; return the checkpoint when it is published. Collective.

        Raises:
            CheckpointError: it could not be written, on every rank.
        """
        draft, step, self._draft = self._draft, self._step, None  # none is under way after an error
        assert draft is not None
        path = draft.path

        def result() -> Any:
            with disk_errors(path):
                return self._beside.result()

        with cpu_group() as group, removed_on_error(draft):
            answers = gather_results(result, group)
        if step == "prune":
            self._keeper = answers[0] or self._keeper
            return None
        job: partial[Any] = partial(self._keeper.prune_after, draft.folder)
        if draft.local:
            job = partial(remove_others, draft.folder.parent, draft.folder)
        if step == "copy":
            files = {name: entry for of_rank in answers for name, entry in of_rank.items()}
            draft = replace(draft, manifest=replace(draft.manifest, files=files))
            job = partial(publish, draft)
        self._draft, self._step = draft, "publish" if step == "copy" else "prune"
        if draft.owner:
            self._beside.begin(job)
        return draft.folder if step == "publish" else None

    def wait(self) -> Path | None:
        """Take all steps that are left; return the checkpoint if one is published. Collective, raises as ``step``."""
        found = None
        while self.under_way:
            # Asked again and again: no collective waits for long, however slow the disk is.
            if all(gather_results(lambda: self._beside.done(seconds=1.0))):
                found = self.step() or found
        return found

"""Saves that are written while training goes on.

DCP's own ``async_save`` in processes does not fit: these meet in a process group of their own, whose collectives wait
for a lost one's timeout, and training learns of an error neither at one step on all ranks nor by the file's name. Here
DCP writes into memory, as into files, and a process of each rank copies these to the disk.
"""

import io
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.filesystem import FileSystem

from checkpoint.drafts import Draft, publish, removed_on_error
from checkpoint.local import remove_others
from checkpoint.manifest import disk_errors
from checkpoint.search import Keeper
from runtime.files import copy_files
from runtime.ranks import HelperProcess
from runtime.together import gather_results


class _File(io.IOBase):
    """A file in memory, written through a mapping that stays, in two thirds of the time that ``os.write`` takes."""

    def __init__(self, name: str) -> None:
        self.handle = os.memfd_create(name)
        os.ftruncate(self.handle, mmap.PAGESIZE)
        self._mapped = mmap.mmap(self.handle, mmap.PAGESIZE)
        self._end = 0
        self._there = 0
        """Bytes whose memory is there."""

    def begin(self) -> None:
        """Write from its beginning: a store beyond the file's end would be a signal."""
        os.ftruncate(self.handle, len(self._mapped))
        self._end = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write at ``tell()``; raises OSError where memory is short, which in a store is a signal."""
        view = memoryview(data).cast("B")
        end = self._end + len(view)
        if end > len(self._mapped):
            self._mapped.resize(max(end, 2 * len(self._mapped)))
        if end > self._there:
            os.posix_fallocate(self.handle, self._there, end - self._there)
            self._there = end
        self._mapped[self._end : end] = view
        self._end = end
        return len(view)

    def tell(self) -> int:
        return self._end

    def cut(self) -> None:
        """Make ``tell()`` its end; what is mapped behind it takes no memory."""
        os.ftruncate(self.handle, self._end)
        self._there = self._end

    def close(self) -> None:
        """Stay open, whoever writes: the next save writes it over."""

    def free(self) -> None:
        self._mapped.close()
        os.close(self.handle)


class Memory(FileSystem):
    """Files in memory, which go with this process; they are written over, so that memory is the same at every save."""

    def __init__(self) -> None:
        self.files: dict[str, _File] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file from its beginning."""
        name = Path(path).name
        file = self.files[name] = self.files.get(name) or _File(name)
        file.begin()
        yield file
        file.cut()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name; the one that had it is gone."""
        if (old := self.files.get(Path(new_path).name)) is not None:
            old.free()
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Say that nothing is in the way."""
        return False

    def paths(self) -> dict[str, str]:
        """Return where other processes of this user can open each file."""
        return {name: f"/proc/{os.getpid()}/fd/{file.handle}" for name, file in self.files.items()}


class Background:
    """One save at a time, in two steps: each rank's process copies, then the draft's owner's publishes and prunes.

    A step is taken when the one before is done on all ranks, which the caller finds out: it adds up ``ready`` in a
    reduction that it makes anyway. So no collective runs beside training, and errors come up on all ranks together.
    """

    def __init__(self, keeper: Keeper) -> None:
        self.memory = Memory()
        self._keeper = keeper
        self._beside = HelperProcess("writes checkpoints")
        self._draft: Draft | None = None
        self._step: Literal["copy", "publish"] = "copy"

    def begin(self, draft: Draft) -> None:
        """Begin to write a draft from ``memory``; none may be under way."""
        self._draft, self._step = draft, "copy"
        self._beside.begin(partial(copy_files, self.memory.paths(), draft.path))

    @property
    def under_way(self) -> bool:
        """Return whether a save is not over yet; alike on all ranks."""
        return self._draft is not None

    @property
    def ready(self) -> bool:
        """Return whether a save is under way, and this rank is done with its step."""
        return self.under_way and self._beside.done()

    def step(self) -> Path | None:
        """Take the next step, as all ranks are ``ready``; return the checkpoint after the last one. Collective.

        Raises CheckpointError: it could not be written, on every rank.
        """
        draft, step, self._draft = self._draft, self._step, None  # none is under way after an error
        assert draft is not None
        path = draft.path

        def result() -> Any:
            with disk_errors(path):
                return self._beside.result()

        with removed_on_error(draft.made):
            answers = gather_results(result)
        if step == "publish":
            self._keeper = answers[0] or self._keeper
            return draft.folder
        files = {name: entry for of_rank in answers for name, entry in of_rank.items()}
        draft = replace(draft, manifest=replace(draft.manifest, files=files))
        self._draft, self._step = draft, "publish"
        if draft.owner:
            self._beside.begin(partial(_publish, draft, self._keeper))
        return None

    def wait(self) -> Path | None:
        """Take all steps that are left; return the checkpoint if one is published. Collective, raises as ``step``."""
        found = None
        while self.under_way:
            # Asked again and again: no collective waits for long, however slow the disk is.
            if all(gather_results(lambda: self._beside.done(seconds=1.0))):
                found = self.step() or found
        return found


def _publish(draft: Draft, keeper: Keeper) -> Keeper | None:
    """Publish a draft and remove what is not kept; return what the keeper knows then."""
    publish(draft)
    if not draft.local:
        return keeper.prune_after(draft.folder)
    remove_others(draft.folder.parent, draft.folder)
    return None

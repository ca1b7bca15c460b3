"""From an empty draft to a checkpoint, at once or beside training: room for it, its name, and its
one rename.
"""

import shutil
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from runtime.files import fsync, write_text
from runtime.together import from_first, gather_results, is_first, work_alone
from train.checkpoint.manifest import (
    METADATA,
    CheckpointError,
    Manifest,
    describe,
    disk_errors,
    remove_others,
    write_manifest,
)
from train.checkpoint.search import POINTER, Keeper, to_stderr, what_is_broken

if TYPE_CHECKING:
    from train.checkpoint.tensors import Copies, Shards

Steps = Generator[Callable[[], Any], list[Any], None]
"""Work of this rank, and then what all ranks returned of it."""


class Room(NamedTuple):
    """A folder of a draft."""

    path: Path
    free: int | None
    """Bytes that were free there; None if the file system does not say."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A checkpoint that is being written."""

    path: Path
    folder: Path
    """Its name once it is published."""
    manifest: Manifest
    """Without files until they are written."""
    owner: bool
    """True if this rank publishes it: the first one, or one of each node where ``local``."""
    local: bool
    """True if each node has a folder of its own, of which the newest checkpoint alone stays."""

    @property
    def made(self) -> list[Path]:
        """Its folder, if this rank made it."""
        return [self.path] if self.owner else []


def start_draft(folder: Path, manifest: Manifest, *, local: bool) -> tuple[Draft, list[Room]]:
    """Create an empty draft of ``folder``; a broken checkpoint of this name is moved aside.
    Collective.

    Returns it, and the room in each of its folders. Raises CheckpointError: the name is a whole
    checkpoint's, or the disk refuses; on every rank.
    """
    # A name of its own: ranks of a run that is over, or cut off from its peers, may still be
    # writing into theirs.
    mine = uuid.uuid4().hex[:8]
    path = folder.with_name(f"{folder.name}.{from_first(lambda: mine) if local else mine}.tmp")
    made: list[Path] = []

    def start() -> Room | None:
        with disk_errors(path):
            if not local and (not is_first() or folder.exists()):
                return None
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if local else 0o777)
            if not local:
                remove_drafts(path.parent)  # of killed runs
            try:
                path.mkdir()
            except FileExistsError:  # another rank of this node has made it
                return None
            made.append(path)
            size = shutil.disk_usage(path)
            return Room(path, size.free if size.total else None)

    with removed_on_error(made):
        rooms = [room for room in gather_results(start) if room is not None]
    if not rooms:
        _free_name(folder)
        return start_draft(folder, manifest, local=local)
    path = path if local else rooms[0].path
    return Draft(path=path, folder=folder, manifest=manifest, owner=bool(made), local=local), rooms


def _free_name(folder: Path) -> None:
    """Rename a broken checkpoint: a run resumed from an earlier one reaches its iteration again."""
    if (problem := what_is_broken(folder)) is None:
        raise CheckpointError(
            f"{folder} exists and is whole; move it away or choose another --save, it is not overwritten"
        )

    def move_aside() -> None:
        with disk_errors(folder):
            names = (folder.with_name(f"{folder.name}.broken-{number}") for number in count(1))
            aside = next(name for name in names if not name.exists())
            folder.rename(aside)
        to_stderr(f"moved a broken one to {aside}: {problem}")

    from_first(move_aside)


def remove_drafts(directory: Path) -> None:
    """Remove unfinished saves of a killed run. Only the folder's owner may call this: it is the
    only writer.
    """
    for left_over in directory.glob("iter_*.tmp"):
        shutil.rmtree(
            left_over, ignore_errors=True
        )  # a rank that is ending may still write there; the next save tries


def check_room(rooms: Sequence[Room], needed: int) -> None:
    """Raise before writing, alike on every rank, if a folder is too small for its share of the
    bytes ``needed``.
    """
    share = needed // len(rooms)
    for path, free in rooms:
        if free is not None and free < share:
            raise CheckpointError(
                f"cannot write {path}: {free:,} bytes are free in {path.parent} and {share:,} are needed; remove older "
                "checkpoints (--keep-last N does), or write to another folder"
            )


def save_steps(draft: Draft, shards: "Shards", keeper: Keeper | None = None) -> Steps:
    """Yield what this rank does to make a checkpoint of a draft; each next step is for all ranks
    together.

    The work has no collectives, so that it may be done beside training; ``keeper`` then prunes
    where it is done.
    """
    path, folder = draft.path, draft.folder

    def write() -> tuple[Any, dict[str, tuple[int, str]]]:
        results, rank = shards.write(path), dist.get_rank() if dist.is_initialized() else 0
        with disk_errors(path):  # DCP names this rank's files so
            return results, {file.name: describe(file) for file in sorted(path.glob(f"__{rank}_*"))}

    written = yield write

    def table() -> tuple[int, str]:
        shards.finish([results for results, _ in written])
        return describe(path / METADATA)

    files = {name: entry for _, own in written for name, entry in own.items()} | {
        METADATA: from_first(table)
    }

    def publish() -> (
        None
    ):  # with one rename: before it there is no checkpoint, after it a whole one
        if not draft.owner:
            return
        with disk_errors(path):
            there = {file.name for file in path.iterdir()}
            odd = there - files.keys() if draft.local else there ^ files.keys()
            if odd:
                raise CheckpointError(
                    f"{path} holds other files than the ranks wrote: {', '.join(sorted(odd))}"
                )
            write_manifest(path, replace(draft.manifest, files=files))
            path.rename(folder)
            fsync(folder.parent)
            write_text(folder.parent / POINTER, f"{draft.manifest.iteration}\n")
        if keeper is not None and not draft.local:
            keeper.prune_after(folder)

    yield publish
    if draft.local and draft.owner:
        remove_others(folder.parent, folder)


def run_steps(steps: Steps) -> None:
    """Take all steps at once; collective."""
    with suppress(StopIteration):
        work = next(steps)
        while True:
            work = steps.send(gather_results(work))


class Background:
    """One save at a time, written by a thread of each rank from copies of its tensors, while
    training goes on.

    DCP's own ``async_save`` does not fit: it meets in a process group of its own, whose collectives
    wait for a lost rank's timeout, and training learns of an error neither at one step on all ranks
    nor by the file's name. Here a step is taken when the one before is done on all ranks, which the
    caller finds out: it adds up ``ready`` in a reduction that it makes anyway. So no collective
    runs beside training, and errors come up on all ranks together.
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
        """Take the next step, as all ranks are ``ready``; return the checkpoint after the last one.
        Collective.

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
        """Take all steps that are left; return the checkpoint if one is published. Collective,
        raises as ``step``.
        """
        found = None
        while self._save is not None:
            # Asked again and again: no collective waits for long, however slow the disk is.
            wait([self._save[2]], timeout=1.0)
            if all(gather_results(lambda: self.ready)):
                found = self.step() or found
        return found


@contextmanager
def removed_on_error(made: Sequence[Path]) -> Iterator[None]:
    """Remove the drafts that this rank made where a save fails."""
    try:
        yield
    except BaseException:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
        raise

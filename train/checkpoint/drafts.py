"""From an empty draft to a published checkpoint, at once or in the background.

A save writes into a draft, and the draft becomes a checkpoint by one rename: before it there is no
checkpoint of this name, after it a whole one. A draft's name is unique, since ranks of a run that
was killed, or is cut off from its peers, may still be writing into theirs.
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
from train.checkpoint.local import remove_others
from train.checkpoint.manifest import (
    METADATA,
    CheckpointError,
    Manifest,
    describe,
    disk_errors,
    write_manifest,
)
from train.checkpoint.search import POINTER, Keeper, to_stderr
from train.checkpoint.verify import find_damage

if TYPE_CHECKING:
    from train.checkpoint.shards import Copies, Shards

Steps = Generator[Callable[[], Any], list[Any], None]
"""Generator that yields this rank's next work, and receives the results of all ranks."""


class Room(NamedTuple):
    """A draft's folder, and the free space of its disk."""

    path: Path
    free: int | None
    """Number of free bytes; None if the file system does not report it."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A checkpoint that is being written."""

    path: Path
    folder: Path
    """The checkpoint's path once the draft is published."""
    manifest: Manifest
    """The manifest, which lists no files until they are written."""
    owner: bool
    """True if this rank publishes the draft: the first rank, or one per node if ``local``."""
    local: bool
    """True if each node has a folder of its own, which keeps only the newest checkpoint."""

    @property
    def owned(self) -> list[Path]:
        """The draft's folder if this rank owns it, for ``removed_on_error``."""
        return [self.path] if self.owner else []


def start_draft(folder: Path, manifest: Manifest, *, local: bool) -> tuple[Draft, list[Room]]:
    """Create an empty draft of ``folder``; return it with the free space for each of its folders.

    A broken checkpoint of this name is moved aside. Collective. Raises CheckpointError on every
    rank if ``folder`` is a whole checkpoint already, or if the disk cannot be written to.
    """
    mark = uuid.uuid4().hex[:8]
    if local:
        mark = from_first(lambda: mark)
    path = folder.with_name(f"{folder.name}.{mark}.tmp")
    created: list[Path] = []

    def start() -> Room | None:
        with disk_errors(path):
            if not local and (not is_first() or folder.exists()):
                return None
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if local else 0o777)
            if not local:
                remove_drafts(path.parent)  # left by killed runs
            try:
                path.mkdir()
            except FileExistsError:  # another rank of this node has made it
                return None
            created.append(path)
            usage = shutil.disk_usage(path)
            return Room(path, usage.free if usage.total else None)

    with removed_on_error(created):
        rooms = [room for room in gather_results(start) if room is not None]
    if not rooms:
        _free_name(folder)
        return start_draft(folder, manifest, local=local)

    draft = Draft(
        path=path if local else rooms[0].path,
        folder=folder,
        manifest=manifest,
        owner=bool(created),
        local=local,
    )
    return draft, rooms


def _free_name(folder: Path) -> None:
    """Move a broken checkpoint aside, since a run that resumed from an older one saves it again."""
    problem = find_damage(folder)
    if problem is None:
        raise CheckpointError(
            f"{folder} is a whole checkpoint, which is not overwritten; move it away, or choose "
            "another --save"
        )

    def move_aside() -> None:
        with disk_errors(folder):
            for number in count(1):
                aside = folder.with_name(f"{folder.name}.broken-{number}")
                if not aside.exists():
                    break
            folder.rename(aside)
        to_stderr(f"moved a broken one to {aside}: {problem}")

    from_first(move_aside)


def remove_drafts(directory: Path) -> None:
    """Remove unfinished saves of a killed run.

    Only the run that owns the folder may call this, since then no other run writes into it.
    """
    for draft in directory.glob("iter_*.tmp"):
        # A rank that is being killed may still write there; the next save removes the rest.
        shutil.rmtree(draft, ignore_errors=True)


def check_room(rooms: Sequence[Room], needed: int) -> None:
    """Raise CheckpointError if a folder lacks space for its share of the bytes ``needed``.

    All ranks have the same ``rooms``, so all of them raise, before anything is written.
    """
    share = needed // len(rooms)
    for path, free in rooms:
        if free is not None and free < share:
            raise CheckpointError(
                f"cannot write {path}: {free:,} bytes are free in {path.parent}, but {share:,} are "
                "needed; remove older checkpoints (--keep-last N does so), or write to another "
                "folder"
            )


def save_steps(draft: Draft, shards: "Shards", keeper: Keeper | None = None) -> Steps:
    """Yield this rank's work to turn a draft into a checkpoint, step by step.

    A step begins once all ranks have finished the one before. The work itself has no collectives,
    so that a thread can do it during training; such a save has a ``keeper``, which removes older
    checkpoints in the last step.
    """
    path = draft.path

    def write() -> tuple[Any, dict[str, tuple[int, str]]]:
        results = shards.write(path)
        rank = dist.get_rank() if dist.is_initialized() else 0
        files = {}
        with disk_errors(path):
            for file in sorted(path.glob(f"__{rank}_*")):  # DCP's names of this rank's files
                files[file.name] = describe(file)
        return results, files

    written = yield write

    def write_table() -> tuple[int, str]:
        shards.finish([results for results, _ in written])
        return describe(path / METADATA)

    files: dict[str, tuple[int, str]] = {}
    for _, rank_files in written:
        files |= rank_files
    files[METADATA] = from_first(write_table)

    def publish() -> None:
        if draft.owner:
            _publish(draft, files)
            if keeper is not None and not draft.local:
                keeper.prune_after(draft.folder)

    yield publish
    if draft.local and draft.owner:
        remove_others(draft.folder.parent, draft.folder)


def _publish(draft: Draft, files: dict[str, tuple[int, str]]) -> None:
    """Write the manifest and rename the draft: the checkpoint appears whole, or not at all."""
    with disk_errors(draft.path):
        present = {file.name for file in draft.path.iterdir()}
        strange = present - files.keys()
        # A node-local draft lacks the files of other nodes' ranks, so only extra files are wrong.
        if not draft.local:
            strange |= files.keys() - present
        if strange:
            raise CheckpointError(
                f"{draft.path} has lost or gained files since the ranks wrote it: "
                f"{', '.join(sorted(strange))}; let no other program write there"
            )
        write_manifest(draft.path, replace(draft.manifest, files=files))
        draft.path.rename(draft.folder)
        fsync(draft.folder.parent)
        write_text(draft.folder.parent / POINTER, f"{draft.manifest.iteration}\n")


def run_steps(steps: Steps) -> None:
    """Take all steps of a save, one right after the other. Collective."""
    with suppress(StopIteration):
        work = next(steps)
        while True:
            work = steps.send(gather_results(work))


class Background:
    """Writes one save at a time, in a thread of each rank and from copies, during training.

    DCP's own ``async_save`` does not fit: it uses another process group, whose collectives wait for
    a lost rank until they time out, and each rank learns of an error at a different step, without
    the name of the file. Here a step begins when all ranks have finished the one
    before. The caller finds that out by adding ``ready`` to a reduction that it makes anyway. So no
    collective runs during training, and errors are raised on all ranks together.
    """

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.memory: Copies = {}
        self._thread = ThreadPoolExecutor(1, "checkpoints", initializer=work_alone)
        self._save: tuple[Draft, Steps, Future[Any]] | None = None

    def begin(self, draft: Draft, steps: Steps) -> None:
        """Begin to write a draft from the copies in ``memory``; no other save may be under way."""
        self._save = draft, steps, self._thread.submit(next(steps))

    @property
    def under_way(self) -> bool:
        """True if a save has begun and not ended; the same on all ranks."""
        return self._save is not None

    @property
    def ready(self) -> bool:
        """True if a save is under way, and this rank has finished its step."""
        return self._save is not None and self._save[2].done()

    def step(self) -> Path | None:
        """Take the next step; return the checkpoint if it was the last one.

        Collective, once all ranks are ``ready``. Raises CheckpointError on every rank if the
        checkpoint could not be written.
        """
        assert self._save is not None
        draft, steps, work = self._save
        self._save = None  # after an error no save is under way
        with removed_on_error(draft.owned):
            results = gather_results(work.result)
            try:
                self._save = draft, steps, self._thread.submit(steps.send(results))
            except StopIteration:
                return draft.folder
        return None

    def wait(self) -> Path | None:
        """Take all remaining steps; return the checkpoint if one is published.

        Collective; raises the errors of ``step``.
        """
        published = None
        while self._save is not None:
            # Ranks poll each other, so that no collective waits for long, however slow the disk is.
            wait([self._save[2]], timeout=1.0)
            if all(gather_results(lambda: self.ready)):
                published = self.step() or published
        return published


@contextmanager
def removed_on_error(drafts: Sequence[Path]) -> Iterator[None]:
    """Remove the drafts that this rank made if a save fails."""
    try:
        yield
    except BaseException:
        for path in drafts:
            shutil.rmtree(path, ignore_errors=True)
        raise

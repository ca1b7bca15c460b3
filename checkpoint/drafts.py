"""From an empty draft to a checkpoint: room for it, its name, and its one rename."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from checkpoint.manifest import METADATA, CheckpointError, Manifest, describe, write_manifest
from checkpoint.search import POINTER, to_stderr, what_is_broken
from runtime.files import fsync_folder, reason, room, write_text
from runtime.together import from_first, gather_results, is_first, raise_together


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A checkpoint that is being written."""

    path: Path
    folder: Path
    """Its name once it is published."""
    manifest: Manifest
    """Without files until they are written."""
    owner: bool
    """Whether this rank publishes it: the first one, or one of each node where ``local``."""
    local: bool
    """Whether each node has a folder of its own, of which the newest checkpoint alone stays."""
    share: float
    """Of all bytes, how many are written into each folder."""


def start_draft(folder: Path, manifest: Manifest, group: dist.ProcessGroup | None, *, local: bool) -> Draft:
    """Free the name ``folder``, without removing any finished checkpoint, and create an empty draft for it."""
    if not local:
        path, owner = _make_room(folder, group), is_first(group)
        return Draft(path=path, folder=folder, manifest=manifest, owner=owner, local=False, share=1.0)
    path = folder.with_name(f"{folder.name}.{from_first(lambda: uuid.uuid4().hex[:8], group)}.tmp")
    owners = gather_results(lambda: _is_made_here(path), group)
    owner = owners[dist.get_rank(group) if dist.is_initialized() else 0]
    return Draft(path=path, folder=folder, manifest=manifest, owner=owner, local=True, share=1 / sum(owners))


def _is_made_here(draft: Path) -> bool:
    with disk_errors(draft), suppress(FileExistsError):
        draft.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.mkdir()
        return True
    return False


def _make_room(folder: Path, group: dist.ProcessGroup | None) -> Path:
    if from_first(folder.exists, group):
        problem = what_is_broken(folder, group)
        if problem is None:
            raise CheckpointError(
                f"{folder} exists and is whole; move it away or choose another --save, it is not overwritten"
            )
        from_first(lambda: _move_aside(folder, problem), group)
    draft = from_first(lambda: _start_draft(folder), group)
    with raise_together(group):
        if not draft.is_dir():
            raise CheckpointError(f"{draft}, made by the first rank, is not seen by all; --save needs a shared disk")
    return draft


def _move_aside(folder: Path, problem: str) -> None:
    """Rename a broken checkpoint: a run resumed from an earlier one reaches its iteration again."""
    with disk_errors(folder):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.broken-{number}")).exists():
            number += 1
        folder.rename(aside)
    to_stderr(f"moved a broken one to {aside}: {problem}")


def _start_draft(folder: Path) -> Path:
    # A name of its own: ranks of a run that is over, or cut off from its peers, may still be writing into theirs.
    draft = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    with disk_errors(draft):
        draft.parent.mkdir(parents=True, exist_ok=True)
        remove_drafts(draft.parent)
        draft.mkdir()
    return draft


def remove_drafts(directory: Path) -> None:
    """Remove unfinished saves of a killed run. Only the folder's owner may call this: it is the only writer."""
    for left_over in directory.glob("iter_*.tmp"):
        shutil.rmtree(left_over, ignore_errors=True)  # a rank that is ending may still write there; the next save tries


def check_room(draft: Path, needed: int) -> None:
    """Raise before writing if the disk is too small; skip file systems that do not report their size."""
    with disk_errors(draft):
        size = shutil.disk_usage(draft)
    if size.total and size.free < needed:
        raise CheckpointError(
            f"cannot write {draft}: {room(draft.parent, needed)}; remove older checkpoints (--keep-last N does), or "
            "write to another folder"
        )


def own_files(draft: Path, group: dist.ProcessGroup | None) -> list[tuple[str, tuple[int, str]]]:
    """Return name, size and SHA-256 of this rank's files, which DCP names ``__RANK_*``."""
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    with disk_errors(draft):
        paths = sorted(draft.glob(f"__{rank}_*")) + ([draft / METADATA] if rank == 0 else [])
        return [(path.name, describe(path)) for path in paths]


def publish(draft: Draft) -> None:
    """Turn a draft into a checkpoint with one rename: before it there is none, after it a whole one."""
    path, folder, manifest = draft.path, draft.folder, draft.manifest
    with disk_errors(path):
        there = {file.name for file in path.iterdir()}
        odd = there - manifest.files.keys() if draft.local else there ^ manifest.files.keys()
        if odd:
            raise CheckpointError(f"{path} holds other files than the ranks wrote: {', '.join(sorted(odd))}")
        write_manifest(path, manifest)
        path.rename(folder)
        fsync_folder(folder.parent)
        write_text(folder.parent / POINTER, f"{manifest.iteration}\n")


@contextmanager
def removed_on_error(draft: Draft) -> Iterator[None]:
    """Remove a draft whose save fails."""
    try:
        yield
    except BaseException:
        if draft.owner:
            shutil.rmtree(draft.path, ignore_errors=True)
        raise


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the checkpoint."""
    try:
        yield
    except OSError as error:
        said = reason(error, path.parent)
        raise CheckpointError(f"cannot write {path}: {said}; make room for it or write to another folder") from error

"""The files of a checkpoint: a manifest with their checksums, and the local tier, where nodes have
them between them.

A local checkpoint is in a folder of each node, a RAM disk or NVMe, of which the newest stays. Each
node has the files of its own ranks, and the manifest, which lists those of all. So it is whole
where the nodes have all of its files between them, and loads as any other once each node has those
that it reads.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime import __version__
from runtime.errors import UserError
from runtime.files import read_regular, reason, sha256, write_text
from runtime.together import from_first, gather_results, raise_together

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
METADATA = ".metadata"  # DCP's table of tensors
STARTS = "starts.jsonl"
"""A file of a run's folder: a line for each start, the first of which tells the run from all
others.
"""


class CheckpointError(UserError):
    """A checkpoint cannot be written, is broken, or belongs to another model."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the checkpoint."""
    try:
        yield
    except OSError as error:
        said = reason(error, path.parent)
        raise CheckpointError(
            f"cannot write {path}: {said}; make room for it or write to another folder"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a checkpoint folder, and the model and run state that they belong to."""

    iteration: int
    architecture: dict[str, Any]
    """The model's description, compared before a load."""
    extra: dict[str, Any]
    """The rest of the run's state, such as the consumed samples."""
    files: dict[str, tuple[int, str]]
    """Size in bytes and SHA-256 of every file in the folder except the manifest."""
    torch_version: str = str(torch.__version__)
    longmesh_version: str = __version__


def checkpoint_folder(directory: str | Path, iteration: int) -> Path:
    """Return the folder of an iteration's checkpoint in a run's folder."""
    return Path(directory) / f"iter_{iteration:07d}"


def is_count(value: object) -> bool:
    """Return whether a value of JSON is a count that a run can reach: a whole number that every
    reader keeps.
    """
    return type(value) is int and 0 <= value < 1 << 53


def describe(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a file."""
    return path.stat().st_size, sha256(path)


def remove(folder: Path, *, ignore_errors: bool = False) -> None:
    """Remove a checkpoint or a draft, renamed first, so that a kill leaves a draft and no broken
    checkpoint.

    Raises OSError: it cannot be renamed or, unless these errors are ignored, removed.
    """
    draft = folder.with_name(f"iter_{uuid.uuid4().hex[:8]}.tmp")
    folder.rename(draft)
    shutil.rmtree(draft, ignore_errors=ignore_errors)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` with a checksum of itself, since everything else is verified against
    it.
    """
    # Round-trip through JSON, so the checksum covers what a reader gets (tuples and integer keys
    # change).
    content = json.loads(json.dumps({"format_version": FORMAT_VERSION, **asdict(manifest)}))
    content["checksum"] = _checksum(content)
    write_text(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def read_manifest(folder: str | Path) -> Manifest:
    """Read and verify the manifest of a checkpoint folder, not the files that it lists.

    Raises CheckpointError: it is missing, truncated, altered, of another format, or names a file
    outside its folder.
    """
    path = Path(folder) / MANIFEST
    try:
        content = json.loads(read_regular(path))
        if not isinstance(content, dict):
            raise ValueError(f"{path.name} holds no JSON object")
        checksum = content.pop("checksum")
        version = content.pop("format_version")
        intact = checksum == _checksum({"format_version": version, **content})
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; a checkpoint without it was never finished"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}); load another one"
        ) from error
    if not intact:
        raise CheckpointError(
            f"{path} does not match its own checksum; it was altered, load another checkpoint"
        )
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {version}, this version reads {FORMAT_VERSION}; use a matching one"
        )
    try:
        manifest = Manifest(
            **{"longmesh_version": "unknown", **content}
        )  # checkpoints before 0.1.0 do not say
        files = {name: (size, digest) for name, (size, digest) in manifest.files.items()}
        if not isinstance(manifest.architecture, dict) or not isinstance(manifest.extra, dict):
            raise ValueError("architecture or extra is no table")
        for name, number in [
            ("iteration", manifest.iteration),
            *((name, size) for name, (size, _) in files.items()),
        ]:
            if not is_count(number):
                raise ValueError(f"{name} has {number!r:.40}, no whole number below 2^53")
        if odd := [
            name for name, (_, digest) in files.items() if not re.fullmatch("[0-9a-f]{64}", digest)
        ]:
            raise ValueError(f"{min(odd)} has no SHA-256")
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint's manifest ({error}); load another one"
        ) from error
    for name in files:
        if name in ("", ".", "..") or name != os.path.basename(name):
            raise CheckpointError(
                f"{path} names {name!r}, which is not a file of its own folder; do not trust it"
            )
    return replace(manifest, files=files)


def _checksum(content: dict[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True))


def local_folder(directory: str | None, save: str) -> Path | None:
    """Return the folder of a run's local checkpoints in a node's directory; None without, or before
    its first start.

    Its name has the run's fingerprint, of the path ``save`` and the time of its first start.
    Collective; raises CheckpointError if it is a link, or another user's.
    """
    name = None if directory is None else from_first(lambda: fingerprint(Path(save)))
    if directory is None or name is None:
        return None
    folder = Path(directory) / name
    with raise_together():
        if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != os.getuid()):
            raise CheckpointError(
                f"{folder} is no folder of yours; choose another --non-persistent-local-ckpt-dir"
            )
    return folder


def fingerprint(save: Path) -> str | None:
    """Return the name of a run's folder with a digest of its path and first start; None before
    that.
    """
    if not (starts := save / STARTS).exists():
        return None
    path, (first, newline, _) = os.path.realpath(save), read_regular(starts).partition("\n")
    return f"{os.path.basename(path)}-{sha256(path + first + newline)[:12]}"


def remove_others(local: Path, kept: Path | None) -> None:
    """Remove all but one of this node's local checkpoints, drafts too; its ranks may do so at once."""
    for path in local.glob("iter_*"):
        if path != kept:
            with suppress(OSError):  # another rank was first
                remove(path, ignore_errors=True)  # another rank may be at it too


def fetch_missing(folder: Path, names: Collection[str]) -> None:
    """Copy those files of a verified checkpoint that this rank reads and its node lacks from
    another node; collective.

    One rank of each node writes a file, beside the node's own. Raises OSError on every rank if
    there is no room.
    """
    here = {path.name for path in folder.iterdir()}
    seen = gather_results(lambda: (here, sorted(set(names) - here), uuid.uuid4().hex[:8]))
    if not any(lacking for _, lacking, _ in seen):
        return
    rank, mark = dist.get_rank(), seen[0][2]
    files = read_manifest(folder).files
    sizes = {name: size for name, (size, _) in files.items()}

    def claim() -> list[str]:
        mine = []
        for name in seen[rank][1]:
            with suppress(FileExistsError), (folder / f"{name}.{mark}").open("xb") as file:
                os.posix_fallocate(
                    file.fileno(), 0, sizes[name]
                )  # so that no write fails while another rank sends
                mine.append(name)
        return mine

    claims = gather_results(claim)
    source = {
        name: next(rank for rank, (there, *_) in enumerate(seen) if name in there)
        for name in set().union(*claims)
    }
    content: dict[str, torch.Tensor] = {}
    with raise_together():  # no rank sends before all files are open
        for name in source:
            if rank == source[name] or name in claims[rank]:
                path = folder / (name if rank == source[name] else f"{name}.{mark}")
                content[name] = torch.from_file(
                    str(path), name in claims[rank], sizes[name], dtype=torch.uint8
                )
    for name in sorted(source):
        for target in (other for other, claimed in enumerate(claims) if name in claimed):
            if rank == source[name]:
                for block in content[name].split(1 << 26):
                    dist.send(block, target)
            elif rank == target:
                for block in content[name].split(1 << 26):
                    dist.recv(block, source[name])
    with raise_together():
        for name in claims[rank]:
            path = folder / f"{name}.{mark}"
            with path.open("rb") as file:
                os.fsync(file.fileno())
            if describe(path) != files[name]:
                raise CheckpointError(
                    f"{path} arrived damaged; start again, or remove {folder} on all nodes"
                )
            path.rename(folder / name)

"""The local tier: checkpoints in a folder of each node, a RAM disk or NVMe, of which the newest stays.

Each node has the files of its own ranks, and the manifest, which lists those of all. So a local checkpoint is whole
where the nodes have all of its files between them, and loads as any other once each node has those that it reads.
"""

import os
import uuid
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint.manifest import CheckpointError, describe, read_manifest, remove
from runtime.files import read_own, sha256
from runtime.together import from_first, gather_results, raise_together

STARTS = "starts.jsonl"
"""A file of a run's folder: a line for each start, the first of which tells the run from all others."""


def local_folder(directory: str | None, save: str) -> Path | None:
    """Return the folder of a run's local checkpoints in a node's directory; None without, or before its first start.

    Its name has the run's fingerprint, of the path ``save`` and the time of its first start. Collective; raises
    CheckpointError if it is a link, or another user's.
    """
    name = None if directory is None else from_first(lambda: fingerprint(Path(save)))
    if directory is None or name is None:
        return None
    folder = Path(directory) / name
    with raise_together():
        if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != os.getuid()):
            raise CheckpointError(f"{folder} is no folder of yours; choose another --non-persistent-local-ckpt-dir")
    return folder


def fingerprint(save: Path) -> str | None:
    """Return the name of a run's folder with a digest of its path and first start; None before that."""
    if not (starts := save / STARTS).exists():
        return None
    path, (first, newline, _) = os.path.realpath(save), read_own(starts).partition("\n")
    return f"{os.path.basename(path)}-{sha256(path + first + newline)[:12]}"


def remove_others(local: Path, kept: Path | None) -> None:
    """Remove all but one of this node's local checkpoints, drafts too; its ranks may do so at once."""
    for path in local.glob("iter_*"):
        if path != kept:
            with suppress(OSError):  # another rank was first
                remove(path, ignore_errors=True)  # another rank may be at it too


def bring(folder: Path, names: Collection[str]) -> None:
    """Copy those files of a verified checkpoint that this rank reads and its node lacks from another node; collective.

    One rank of each node writes a file, beside the node's own. Raises OSError on every rank if there is no room.
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
                os.posix_fallocate(file.fileno(), 0, sizes[name])  # so that no write fails while another rank sends
                mine.append(name)
        return mine

    claims = gather_results(claim)
    source = {
        name: next(rank for rank, (there, *_) in enumerate(seen) if name in there) for name in set().union(*claims)
    }
    content: dict[str, Tensor] = {}
    with raise_together():  # no rank sends before all files are open
        for name in source:
            if rank == source[name] or name in claims[rank]:
                path = folder / (name if rank == source[name] else f"{name}.{mark}")
                content[name] = torch.from_file(str(path), name in claims[rank], sizes[name], dtype=torch.uint8)
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
                raise CheckpointError(f"{path} arrived damaged; start again, or remove {folder} on all nodes")
            path.rename(folder / name)

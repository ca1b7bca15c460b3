"""Local checkpoints: only the newest one, in a folder of each node, on a RAM disk or NVMe.

Each node has the files of its own ranks, and the manifest, which lists the files of all ranks. So a
local checkpoint is whole if the nodes together have all of its files, and loads like any other once
each node has the files that it reads.
"""

import os
import uuid
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.files import read_regular, sha256
from runtime.together import from_first, gather_results, raise_together
from train.checkpoint.manifest import STARTS, CheckpointError, describe, read_manifest, remove

BLOCK_BYTES = 1 << 26
"""Number of bytes in one message between nodes."""


def local_folder(directory: str | None, save: str) -> Path | None:
    """Return the folder of a run's local checkpoints in a node's directory.

    Returns None without a directory, or before the run's first start. The folder is named after the
    run's ``fingerprint``. Collective; raises CheckpointError if it is a link or another user's.
    """
    if directory is None:
        return None
    name = from_first(lambda: fingerprint(Path(save)))
    if name is None:
        return None

    folder = Path(directory) / name
    with raise_together():
        if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != os.getuid()):
            raise CheckpointError(
                f"{folder} is a symlink, or belongs to another user; choose another "
                "--non-persistent-local-ckpt-dir"
            )
    return folder


def fingerprint(save: Path) -> str | None:
    """Return a run's name with a digest of its path and first start; None before that start."""
    starts = save / STARTS
    if not starts.exists():
        return None
    path = os.path.realpath(save)
    first, newline, _ = read_regular(starts).partition("\n")
    return f"{os.path.basename(path)}-{sha256(path + first + newline)[:12]}"


def remove_others(local: Path, newest: Path | None) -> None:
    """Remove all of this node's local checkpoints but ``newest``, and its drafts.

    All ranks of a node may do so at the same time.
    """
    for path in local.glob("iter_*"):
        if path != newest:
            with suppress(OSError):  # another rank has removed it already
                remove(path, ignore_errors=True)  # another rank may be removing the same files


def fetch_missing(folder: Path, names: Collection[str]) -> None:
    """Fetch from other nodes the checkpoint files that this rank reads and its node lacks.

    Collective; the checkpoint must be verified. One rank of each node writes a file into the node's
    folder. Raises OSError on every rank if the disk is full.
    """
    local_files = {path.name for path in folder.iterdir()}
    mark = uuid.uuid4().hex[:8]
    views = gather_results(lambda: (local_files, sorted(set(names) - local_files), mark))
    if not any(lacking for _, lacking, _ in views):
        return
    rank = dist.get_rank()
    mark = views[0][2]
    files = read_manifest(folder).files

    def claim() -> list[str]:
        """Open the files that this rank receives, and that no other rank of its node has opened."""
        claimed = []
        for name in views[rank][1]:
            with suppress(FileExistsError), (folder / f"{name}.{mark}").open("xb") as file:
                # Allocated now, so that no write fails while another rank sends.
                os.posix_fallocate(file.fileno(), 0, files[name][0])
                claimed.append(name)
        return claimed

    claims = gather_results(claim)
    senders: dict[str, int] = {}
    for name in set[str]().union(*claims):
        senders[name] = min(other for other, view in enumerate(views) if name in view[0])

    content: dict[str, torch.Tensor] = {}
    with raise_together():  # no rank sends before all files are open
        for name, sender in senders.items():
            size = files[name][0]
            receives = name in claims[rank]
            if rank == sender:
                content[name] = torch.from_file(
                    str(folder / name), receives, size, dtype=torch.uint8
                )
            elif receives:
                content[name] = torch.from_file(
                    str(folder / f"{name}.{mark}"), True, size, dtype=torch.uint8
                )

    # All ranks go through the files and receivers in the same order, so that messages match.
    for name in sorted(senders):
        for receiver, claimed in enumerate(claims):
            if name not in claimed:
                continue
            if rank == senders[name]:
                for block in content[name].split(BLOCK_BYTES):
                    dist.send(block, receiver)
            elif rank == receiver:
                for block in content[name].split(BLOCK_BYTES):
                    dist.recv(block, senders[name])

    with raise_together():
        for name in claims[rank]:
            path = folder / f"{name}.{mark}"
            with path.open("rb") as file:
                os.fsync(file.fileno())
            if describe(path) != files[name]:
                raise CheckpointError(
                    f"{path} arrived damaged; start the run again, or remove {folder} on all nodes"
                )
            path.rename(folder / name)

"""Verify a checkpoint: its manifest, every byte of its files, and DCP's table of tensors.

The ranks divide the files among themselves, so that each byte is read only once. A rank checks only
files that it sees, since nodes may have different files.
"""

import socket
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from runtime.files import not_a_file, sha256
from runtime.together import gather_results, is_alone
from train.checkpoint.manifest import (
    METADATA,
    CheckpointError,
    Manifest,
    checkpoint_folder,
    describe,
    read_manifest,
)


class View(NamedTuple):
    """A checkpoint folder as one rank sees it, to compare the folders of all nodes."""

    host: str
    inode: int
    """Inode of the folder: ranks with the same host and inode read the same files."""
    problem: str
    """Description of what is wrong with the manifest; empty if it is intact."""
    digest: str
    """Digest of the manifest, which must be the same on all ranks; empty if it is broken."""
    files: set[str]


def find_damage(folder: Path, *, read: bool = True, copies: bool = False) -> str | None:
    """Check a checkpoint folder against its manifest, its name and DCP's table of tensors.

    Collective over all ranks, which divide the files among themselves. Returns the problems, each
    with its file, or None if the checkpoint is whole.

    Args:
        read: read every byte; without it only the sizes of the files are compared.
        copies: check every copy of a file, since each node may have one.
    """
    views = gather_results(lambda: _view(folder))
    suffixes = _host_suffixes(views)
    problems_differ = len({view.problem for view in views}) > 1
    unreadable = set()
    for view, suffix in zip(views, suffixes, strict=True):
        if view.problem:
            unreadable.add(view.problem + suffix if problems_differ else view.problem)
    if unreadable:
        return "; ".join(sorted(unreadable))
    if len({view.digest for view in views}) > 1:
        return f"{folder} is not the same checkpoint on all nodes"

    manifest = read_manifest(folder)
    rank = 0 if is_alone() else dist.get_rank()
    readers = _assign_files(manifest, views, copies=copies)

    def check_files() -> list[str]:
        problems = []
        for name, ranks in readers.items():
            if rank in ranks:
                problem = _file_damage(folder / name, *manifest.files[name], read)
                if problem:
                    problems.append(problem)
        return problems

    damages = []
    for problems, suffix in zip(gather_results(check_files), suffixes, strict=True):
        damages += [problem + suffix for problem in problems]
    if damages:
        return "; ".join(sorted(damages))

    # The table is a pickle: it is only read once its bytes are verified.
    table_reader = readers.get(METADATA, [0])[0]
    return gather_results(
        lambda: _table_damage(folder, manifest) if rank == table_reader else None
    )[table_reader]


def _view(folder: Path) -> View:
    host = socket.gethostname()
    try:
        digest = sha256(repr(read_manifest(folder)))
        files = {path.name for path in folder.iterdir()}
        return View(host, folder.stat().st_ino, "", digest, files)
    except (CheckpointError, OSError) as error:
        return View(host, 0, str(error), "", set())


def _host_suffixes(views: list[View]) -> list[str]:
    """Return a suffix for each rank's messages that names its host if there are several hosts."""
    if len({view.host for view in views}) == 1:
        return [""] * len(views)
    return [f" (on {view.host})" for view in views]


def _assign_files(manifest: Manifest, views: list[View], *, copies: bool) -> dict[str, list[int]]:
    """Return the ranks that read each file, the largest file first.

    Files are dealt in turn to the ranks that see them; with ``copies``, to one rank of each node.
    """
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name][0], name))
    readers: dict[str, list[int]] = {}
    for number, name in enumerate(by_size):
        ranks = [rank for rank, view in enumerate(views) if name in view.files]
        if not ranks:  # any rank can report that it is missing
            ranks = list(range(len(views)))
        turn = number % len(ranks)
        ranks = ranks[turn:] + ranks[:turn]

        readers[name] = ranks[:1]
        if copies:
            by_node = {}
            for rank in ranks:
                by_node[views[rank].host, views[rank].inode] = rank
            readers[name] = list(by_node.values())
    return readers


def _file_damage(path: Path, size: int, digest: str, read: bool) -> str | None:
    """Return the difference between a file and its entry in the manifest, if there is one."""
    try:
        kind = not_a_file(path)
        if kind:
            return f"{path} is {kind}, not a file"
        if not path.exists():
            return f"{path} is missing"
        # Size first: it is free, and hashing a file of the wrong size is wasted work.
        actual_size = path.stat().st_size
        if actual_size != size:
            return f"{path} has {actual_size} bytes instead of {size}"
        if read and describe(path)[1] != digest:
            return f"{path} has a different SHA-256 than in the manifest"
        return None
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"


def _table_damage(folder: Path, manifest: Manifest) -> str | None:
    """Return the problem of the folder's name or of DCP's table, if there is one."""
    if folder.name != checkpoint_folder(folder.parent, manifest.iteration).name:
        return (
            f"{folder} holds iteration {manifest.iteration}, not the one in its name; rename the "
            "folder"
        )
    from train.checkpoint.metadata import read_metadata  # imports DCP, which takes half a second

    try:
        read_metadata(folder, manifest)
    except CheckpointError as error:
        return str(error)
    return None

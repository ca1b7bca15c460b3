"""The checkpoints of a run's folder: find the newest whole one, verify every byte of it, remove
older ones.
"""

import json
import re
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from runtime.errors import UserError, printable
from runtime.files import not_a_file, read_regular, sha256
from runtime.together import from_first, gather_results, is_alone, is_first
from train.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    STARTS,
    CheckpointError,
    checkpoint_folder,
    describe,
    is_count,
    read_manifest,
    remove,
)

POINTER = "latest_checkpointed_iteration.txt"


def what_is_broken(folder: Path, *, read: bool = True, copies: bool = False) -> str | None:
    """Check a checkpoint folder against its manifest, its name and DCP's table of tensors.

    Collective over all ranks, which share out the files: a rank that sees a file looks at it, as
    each node may have others. Returns what is wrong, with the files, or None if whole.

    Args:
        read: whether to read every byte; without it the files' sizes are compared.
        copies: whether each node may have its own copy of a file; then every copy is checked.
    """
    seen = gather_results(lambda: _seen(folder))
    hosts, nodes = [host for host, *_ in seen], [(host, place) for host, place, *_ in seen]
    on = [f" (on {host})" if len(set(hosts)) > 1 else "" for host in hosts]
    apart = len({said for _, _, said, *_ in seen}) > 1
    if unread := {
        said + where * apart for (_, _, said, *_), where in zip(seen, on, strict=True) if said
    }:
        return "; ".join(sorted(unread))
    if len({digest for *_, digest, _ in seen}) > 1:
        return f"{folder} is not the same checkpoint on all nodes"
    manifest = read_manifest(folder)
    rank = 0 if is_alone() else dist.get_rank()
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name][0], name))
    readers: dict[str, list[int]] = {}
    for number, name in enumerate(by_size):
        who = [other for other, (*_, there) in enumerate(seen) if name in there] or range(len(seen))
        turn = number % len(who)
        of_each_node = {nodes[other]: other for other in [*who[turn:], *who[:turn]]}
        readers[name] = list(of_each_node.values()) if copies else [who[turn]]
    mine = [name for name in by_size if rank in readers[name]]
    problems = gather_results(
        lambda: [_what_differs(folder / name, *manifest.files[name], read) for name in mine]
    )
    named = [
        problem + where
        for one_rank, where in zip(problems, on, strict=True)
        for problem in one_rank
        if problem
    ]
    # The table is a pickle: read it with care, and only once its bytes are verified.
    table = readers.get(METADATA, [0])[0]
    if named:
        return "; ".join(sorted(named))

    def what_it_lacks() -> str | None:
        if rank != table:
            return None
        if folder.name != checkpoint_folder(folder.parent, manifest.iteration).name:
            return f"{folder} holds iteration {manifest.iteration}, not the one that its name says; rename it"
        from train.checkpoint.tensors import read_metadata  # imports DCP, which takes half a second

        try:
            read_metadata(folder, manifest)
        except CheckpointError as error:
            return str(error)
        return None

    return gather_results(what_it_lacks)[table]


def _seen(folder: Path) -> tuple[str, int, str, str, set[str]]:
    """Return this host, the folder's inode, what is wrong with its manifest, the manifest's digest,
    and the files.
    """
    host = socket.gethostname()
    try:
        digest = sha256(repr(read_manifest(folder)))
        return host, folder.stat().st_ino, "", digest, {path.name for path in folder.iterdir()}
    except (CheckpointError, OSError) as error:
        return host, 0, str(error), "", set()


def _abandoned(directory: Path, written: dict[int, float]) -> set[int]:
    """Return the iterations, with the times of their writing, that a later start left behind: it
    began before them.
    """
    path = directory / STARTS
    starts: list[tuple[float, int]] = []
    for line in read_regular(path).splitlines() if written and path.exists() else ():
        try:
            with suppress(json.JSONDecodeError):  # a kill cut it off
                time, iteration = (start := json.loads(line))["time"], start["iteration"]
                if type(time) not in (int, float) or not is_count(iteration):
                    raise ValueError
                starts.append((time, iteration))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise CheckpointError(
                f"{path} has {line!r:.40}, which is no start of a run; remove the line"
            ) from None
    return {
        iteration
        for iteration, time in written.items()
        if any(began > time and at < iteration for began, at in starts)
    }


def _what_differs(path: Path, size: int, digest: str, read: bool) -> str | None:
    try:
        if kind := not_a_file(path):
            return f"{path} is {kind}, not a file"
        if not path.exists():
            return f"{path} is missing"
        # Size first: it is free, and hashing a file of the wrong size is wasted work.
        found = path.stat().st_size
        if found != size:
            return f"{path} has {found} bytes instead of {size}"
        same = not read or describe(path)[1] == digest
        return None if same else f"{path} has another SHA-256 than the manifest says"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"


def to_stderr(note: str) -> None:
    """Print a note to stderr, apart from the run's output."""
    print(printable(f"checkpoint: {note}"), file=sys.stderr, flush=True)


def checkpoint_of(run: Path, step: int | None = None) -> Path:
    """Return what ``find_checkpoint`` finds in a run's folder; collective. Raises CheckpointError
    if it finds none.
    """
    found = find_checkpoint(run, step)
    if found is None:
        raise CheckpointError(
            f"{run} holds no checkpoint; name the folder that a training run saved to"
        )
    return found


def find_checkpoint(
    directory: str | Path,
    step: int | None = None,
    *,
    report: Callable[[str], None] = to_stderr,
    local: Path | None = None,
) -> Path | None:
    """Return the newest whole checkpoint of a run's folder, every byte verified; None without any.
    Collective.

    Args:
        directory: a run's folder, with ``iter_*`` folders in it.
        step: take exactly this iteration.
        report: called on the first rank for each broken checkpoint skipped, each unfinished save,
            and a pointer file that names another iteration; and for each local one that is not
            taken.
        local: this node's folder of the run's local checkpoints, taken where they are newer and
            whole.

    Raises CheckpointError: ``step`` is missing or broken, or no checkpoint is whole: starting
    afresh would silently lose the run.
    """
    directory = Path(directory)
    found = from_first(lambda: saved_iterations(directory))
    if step is not None and step not in found:
        held = (
            f"it has {', '.join(map(str, found))}; name one of them"
            if found
            else "it has none at all"
        )
        raise CheckpointError(
            f"ckpt_step is {step} and {directory} has no checkpoint of that iteration: {held}"
        )
    shared = [
        checkpoint_folder(directory, iteration) for iteration in (found if step is None else [step])
    ]
    ours: list[Path] = []
    if local is not None:

        def times() -> dict[int, float]:  # when each was written, in seconds
            manifests = {
                number: checkpoint_folder(local, number) / MANIFEST
                for number in saved_iterations(local)
            }
            there = {
                number: path if path.exists() else path.parent for number, path in manifests.items()
            }
            return {number: path.stat().st_mtime for number, path in there.items()}

        there = {number: time for node in gather_results(times) for number, time in node.items()}
        left = from_first(lambda: _abandoned(directory, there))
        ours = [
            checkpoint_folder(local, iteration)
            for iteration in sorted(there.keys() - left, reverse=True)
        ]
    newest_first = sorted(
        shared + (ours if step is None else []), key=lambda path: int(path.name[5:]), reverse=True
    )
    broken: dict[Path, str] = {}
    for folder in newest_first:
        if (problem := what_is_broken(folder, copies=folder in ours)) is None:
            break
        broken[folder] = problem
    taken = next((folder for folder in newest_first if folder not in broken), None)
    if taken is None and any(folder in broken for folder in shared):
        raise CheckpointError(
            f"{directory} has no whole checkpoint to load: {'; '.join(broken.values())}. Load another or move it away"
        )
    if is_first():
        notes = [f"passed over a broken one: {problem}" for problem in broken.values()]
        why = f"{taken} is {'asked for' if step is not None else 'no older'}"
        notes += [f"passed over {path}: {why}" for path in ours if path not in (*broken, taken)]
        if local is not None:
            gone = [checkpoint_folder(local, iteration) for iteration in sorted(left)]
            notes += [
                f"passed over {path}: the run went on from an earlier iteration since"
                for path in gone
            ]
        for note in notes + (
            _remarks(directory, int(taken.name[5:])) if step is None and taken in shared else []
        ):
            report(note)
    return taken


def saved_iterations(directory: Path) -> list[int]:
    """List the iterations that have a folder in a run's folder, newest first. Raises
    CheckpointError if unreadable.
    """
    try:
        names = [
            re.fullmatch(r"iter_(\d{7,})", path.name)
            for path in directory.iterdir()
            if path.is_dir()
        ]
    except FileNotFoundError:
        if directory.is_symlink():
            raise CheckpointError(
                f"{directory} is a symlink that leads nowhere; name a run's folder"
            ) from None
        return []
    except OSError as error:
        raise CheckpointError(
            f"{directory} is not a folder that can be read ({error}); name a run's folder"
        ) from error
    # Ignore names with more leading zeros than ours.
    found = {int(name[1]) for name in names if name}
    return sorted(
        (step for step in found if checkpoint_folder(directory, step).is_dir()), reverse=True
    )


def _remarks(directory: Path, iteration: int) -> list[str]:
    """List unfinished saves, and a pointer file that names another iteration."""
    notes = [
        f"{path} was never finished; a later save removes it"
        for path in sorted(directory.glob("iter_*.tmp"))
    ]
    pointer = directory / POINTER
    try:
        pointed = " ".join(read_regular(pointer, 1000).split()) if pointer.exists() else ""
    except UserError as error:
        return [*notes, str(error)]
    if pointed and pointed != str(iteration):
        notes.append(
            f"{pointer} says {pointed[:20]}, the newest whole one is {iteration}; --ckpt-step loads another"
        )
    return notes


@dataclass(kw_only=True)
class Keeper:
    """Removes the checkpoints of one folder that nobody needs any more."""

    last: int | None
    """Count of the newest whole ones that stay; None keeps all, or one where ``every`` is given."""
    every: int | None
    """A divisor of iterations whose checkpoints stay too."""
    report: Callable[[str], None] = to_stderr
    verified: set[Path] = field(default_factory=set)
    """Checkpoints whose bytes were hashed by this process: later a look at their sizes is enough.
    """

    def prune(self, directory: Path) -> None:
        """Remove what is older than the newest whole ones; collective.

        A broken one counts for nothing, and stays until it is older than the whole ones that count.
        A folder that cannot be removed is reported, and tried again next time.
        """
        if self.last is None and self.every is None:
            return
        wanted = self.last or 1
        for iteration in from_first(lambda: saved_iterations(directory)):
            folder = checkpoint_folder(directory, iteration)
            if wanted:
                wanted -= self._is_whole(folder)
            elif self.every is None or iteration % self.every:
                from_first(lambda folder=folder: self._remove(folder))  # type: ignore[misc]

    def prune_after(self, newest: Path) -> None:
        """Prune as one is written, whose bytes were hashed."""
        self.verified.add(newest)
        self.prune(newest.parent)

    def _is_whole(self, folder: Path) -> bool:
        known = from_first(lambda: folder in self.verified)
        if problem := what_is_broken(folder, read=not known):
            from_first(lambda: self.report(f"not counted among those kept: {problem}"))
            return False
        self.verified.add(folder)
        return True

    def _remove(self, folder: Path) -> None:
        try:
            remove(folder)
        except OSError as error:
            self.report(
                f"cannot remove {folder}, which is older than those to keep: {error.strerror}"
            )

"""The checkpoints of a run's folder: find the newest whole one, remove older ones.

Nothing is trusted by its name or time: a folder counts only after every byte of it was verified,
since a run that resumes from a damaged checkpoint would train on without an error. Checkpoints that
are skipped are reported, and if all are broken the search fails: starting from scratch would
silently lose the run.
"""

import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from runtime.errors import UserError, printable
from runtime.files import read_regular
from runtime.together import from_first, gather_results, is_first
from train.checkpoint.manifest import (
    MANIFEST,
    STARTS,
    CheckpointError,
    checkpoint_folder,
    is_count,
    remove,
)
from train.checkpoint.verify import find_damage

POINTER = "latest_checkpointed_iteration.txt"


def to_stderr(note: str) -> None:
    """Print a note to stderr, apart from the run's output."""
    print(printable(f"checkpoint: {note}"), file=sys.stderr, flush=True)


def checkpoint_of(run: Path, step: int | None = None) -> Path:
    """Return the newest whole checkpoint of a run's folder, or the one of iteration ``step``.

    Collective. Raises CheckpointError if there is none.
    """
    checkpoint = find_checkpoint(run, step)
    if checkpoint is None:
        raise CheckpointError(
            f"{run} holds no checkpoint; name the folder that a training run saved to"
        )
    return checkpoint


def find_checkpoint(
    directory: str | Path,
    step: int | None = None,
    *,
    report: Callable[[str], None] = to_stderr,
    local: Path | None = None,
) -> Path | None:
    """Return the newest whole checkpoint of a run's folder; None if it has no checkpoint.

    Collective. Every byte of the checkpoint is verified.

    Args:
        directory: a run's folder, with ``iter_*`` folders in it.
        step: return exactly this iteration.
        report: called on the first rank for each broken checkpoint skipped, each unfinished save,
            a pointer file that names another iteration, and each local checkpoint not used.
        local: this node's folder of the run's local checkpoints, used if they are newer and whole.

    Raises CheckpointError if ``step`` is missing or broken, or if there are checkpoints but none is
    whole: starting from scratch would silently lose the run.
    """
    directory = Path(directory)
    iterations = from_first(lambda: saved_iterations(directory))
    if step is not None and step not in iterations:
        hint = "it has no checkpoint at all"
        if iterations:
            hint = f"it has {', '.join(map(str, iterations))}; name one of them"
        raise CheckpointError(
            f"ckpt_step is {step}, but {directory} has no checkpoint of that iteration: {hint}"
        )
    if step is not None:
        iterations = [step]

    shared = [checkpoint_folder(directory, iteration) for iteration in iterations]
    on_nodes: list[Path] = []
    abandoned: list[Path] = []
    if local is not None:
        on_nodes, abandoned = _local_checkpoints(directory, local)
    candidates = [*shared, *on_nodes] if step is None else shared

    newest = None
    broken: dict[Path, str] = {}
    for folder in sorted(candidates, key=_iteration_of, reverse=True):
        problem = find_damage(folder, copies=folder in on_nodes)
        if problem is None:
            newest = folder
            break
        broken[folder] = problem
    if newest is None and any(folder in broken for folder in shared):
        raise CheckpointError(
            f"{directory} has no whole checkpoint to load: {'; '.join(broken.values())}. Load "
            "from another folder, or move this one away"
        )

    if is_first():
        notes = [f"passed over a broken one: {problem}" for problem in broken.values()]
        reason = f"{newest} is {'as new or newer' if step is None else 'requested'}"
        for folder in on_nodes:
            if folder not in broken and folder != newest:
                notes.append(f"passed over {folder}: {reason}")
        for folder in abandoned:
            notes.append(
                f"passed over {folder}: the run has since resumed from an earlier iteration"
            )
        if step is None and newest in shared:
            notes += _remarks(directory, _iteration_of(newest))
        for note in notes:
            report(note)
    return newest


def _iteration_of(folder: Path) -> int:
    return int(folder.name.removeprefix("iter_"))


def _local_checkpoints(directory: Path, local: Path) -> tuple[list[Path], list[Path]]:
    """Return the local checkpoints of any node, newest first, and those that a resume abandoned.

    Collective; the paths are in this node's folder, which may lack them.
    """

    def write_times() -> dict[int, float]:
        times = {}
        for iteration in saved_iterations(local):
            path = checkpoint_folder(local, iteration) / MANIFEST
            if not path.exists():
                path = path.parent
            times[iteration] = path.stat().st_mtime
        return times

    times: dict[int, float] = {}
    for node_times in gather_results(write_times):
        times |= node_times
    abandoned = from_first(lambda: _abandoned(directory, times))
    usable = sorted(times.keys() - abandoned, reverse=True)
    return (
        [checkpoint_folder(local, iteration) for iteration in usable],
        [checkpoint_folder(local, iteration) for iteration in sorted(abandoned)],
    )


def _abandoned(directory: Path, times: dict[int, float]) -> set[int]:
    """Return the iterations that a later start abandoned by resuming from an earlier one.

    Args:
        times: time in seconds at which each iteration's checkpoint was written.
    """
    path = directory / STARTS
    if not times or not path.exists():
        return set()

    starts: list[tuple[float, int]] = []
    for line in read_regular(path).splitlines():
        try:
            with suppress(json.JSONDecodeError):  # cut off by a kill
                entry = json.loads(line)
                start_time = entry["time"]
                start_iteration = entry["iteration"]
                if type(start_time) not in (int, float) or not is_count(start_iteration):
                    raise ValueError
                starts.append((start_time, start_iteration))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise CheckpointError(
                f"{path} has a line {line!r:.40}, which does not record a start of the run; remove "
                "the line"
            ) from None

    abandoned = set()
    for iteration, time in times.items():
        if any(start > time and resumed < iteration for start, resumed in starts):
            abandoned.add(iteration)
    return abandoned


def saved_iterations(directory: Path) -> list[int]:
    """List the iterations that have a folder in a run's folder, newest first.

    Raises CheckpointError if the folder cannot be read.
    """
    try:
        names = [path.name for path in directory.iterdir() if path.is_dir()]
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

    iterations = set()
    for name in names:
        match = re.fullmatch(r"iter_(\d{7,})", name)
        # A name with more leading zeros than ``checkpoint_folder`` writes is ignored.
        if match and checkpoint_folder(directory, int(match[1])).is_dir():
            iterations.add(int(match[1]))
    return sorted(iterations, reverse=True)


def _remarks(directory: Path, iteration: int) -> list[str]:
    """List unfinished saves, and a pointer file that names another iteration."""
    notes = []
    for path in sorted(directory.glob("iter_*.tmp")):
        notes.append(f"{path} was never finished; a later save removes it")

    pointer = directory / POINTER
    try:
        pointed = " ".join(read_regular(pointer, 1000).split()) if pointer.exists() else ""
    except UserError as error:
        return [*notes, str(error)]
    if pointed and pointed != str(iteration):
        notes.append(
            f"{pointer} says {pointed[:20]}, but the newest whole checkpoint is {iteration}; "
            "--ckpt-step loads another one"
        )
    return notes


@dataclass(kw_only=True)
class Keeper:
    """Removes the older checkpoints of one folder.

    A broken checkpoint does not count among the newest to keep, and is removed only once it is
    older than all of these, because it may be all that remains of its iteration.
    """

    last: int | None
    """Number of newest whole checkpoints to keep; None keeps all, or one if ``every`` is given."""
    every: int | None
    """Also keep all checkpoints whose iteration is a multiple of this number."""
    report: Callable[[str], None] = to_stderr
    verified: set[Path] = field(default_factory=set)
    """Checkpoints that this process has hashed; later only their files' sizes are compared."""

    def prune(self, directory: Path) -> None:
        """Remove the checkpoints that neither ``last`` nor ``every`` keeps. Collective.

        A folder that cannot be removed is reported, and tried again next time.
        """
        if self.last is None and self.every is None:
            return
        remaining = self.last or 1
        for iteration in from_first(lambda: saved_iterations(directory)):
            folder = checkpoint_folder(directory, iteration)
            if remaining:
                if self._is_whole(folder):
                    remaining -= 1
            elif self.every is None or iteration % self.every:
                from_first(lambda folder=folder: self._remove(folder))  # type: ignore[misc]

    def prune_after(self, newest: Path) -> None:
        """Prune after a checkpoint was written; its bytes were hashed as they were written."""
        self.verified.add(newest)
        self.prune(newest.parent)

    def _is_whole(self, folder: Path) -> bool:
        verified = from_first(lambda: folder in self.verified)
        problem = find_damage(folder, read=not verified)
        if problem:
            from_first(
                lambda: self.report(f"a damaged one does not count among those to keep: {problem}")
            )
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

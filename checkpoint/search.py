"""Find the newest whole checkpoint of a run's folder and verify every byte of it."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from checkpoint.manifest import CheckpointError, Manifest, checkpoint_folder, describe, read_manifest
from runtime.together import from_first, gather_results, is_first

POINTER = "latest_checkpointed_iteration.txt"


def what_is_broken(folder: Path, group: dist.ProcessGroup | None = None, *, read: bool = True) -> str | None:
    """Check a checkpoint folder against its manifest, its name and DCP's table of tensors.

    Collective over ``group``, which shares out the files. Returns what is wrong, with the files, or None if whole.

    Args:
        read: whether to read every byte; without it the files' sizes are compared.
    """
    try:
        manifest = from_first(lambda: read_manifest(folder), group)
    except CheckpointError as error:
        return str(error)
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name][0], name))
    mine = by_size[rank::size]
    problems = gather_results(
        lambda: [_what_differs(folder / name, *manifest.files[name], read) for name in mine], group
    )
    named = [problem for one_rank in problems for problem in one_rank if problem]
    # The table is a pickle: read it with care, and only once its bytes are verified.
    return "; ".join(sorted(named)) or from_first(lambda: _what_is_left_out(folder, manifest), group)


def _what_is_left_out(folder: Path, manifest: Manifest) -> str | None:
    if folder.name != checkpoint_folder(folder.parent, manifest.iteration).name:
        return f"{folder} holds iteration {manifest.iteration}, not the one that its name says; rename it"
    from checkpoint.tensors import read_metadata  # imports DCP, which takes half a second

    try:
        read_metadata(folder, manifest)
    except CheckpointError as error:
        return str(error)
    return None


def _what_differs(path: Path, size: int, sha256: str, read: bool) -> str | None:
    try:
        if not path.is_file():
            return f"{path} is missing"
        # Size first: it is free, and hashing a file of the wrong size is wasted work.
        found = path.stat().st_size
        if found != size:
            return f"{path} has {found} bytes instead of {size}"
        same = not read or describe(path)[1] == sha256
        return None if same else f"{path} has another SHA-256 than the manifest says"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"


def to_stderr(note: str) -> None:
    """Print a note to stderr, apart from the run's output."""
    print(f"checkpoint: {note}", file=sys.stderr, flush=True)


def checkpoint_of(run: Path, step: int | None = None) -> Path:
    """Return what ``find_checkpoint`` finds in a run's folder; collective. Raises CheckpointError if it finds none."""
    found = find_checkpoint(run, step)
    if found is None:
        raise CheckpointError(f"{run} holds no checkpoint; name the folder that a training run saved to")
    return found


def find_checkpoint(
    directory: str | Path,
    step: int | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    report: Callable[[str], None] = to_stderr,
) -> Path | None:
    """Return the newest whole checkpoint of a run's folder, every byte verified; None if there are no checkpoints.

    Collective over ``group`` (default: all ranks).

    Args:
        directory: a run's folder, with ``iter_*`` folders in it.
        step: take exactly this iteration.
        report: called on the first rank for each broken checkpoint skipped, each unfinished save, and a pointer file
            that names another iteration.

    Raises:
        CheckpointError: ``step`` is missing or broken, or no checkpoint is whole: starting afresh would silently lose
            the run.
    """
    directory = Path(directory)
    found = from_first(lambda: saved_iterations(directory), group)
    if step is not None and step not in found:
        held = f"it has {', '.join(map(str, found))}; name one of them" if found else "it has none at all"
        raise CheckpointError(f"ckpt_step is {step} and {directory} has no checkpoint of that iteration: {held}")
    broken: list[str] = []
    for iteration in found if step is None else [step]:
        folder = checkpoint_folder(directory, iteration)
        problem = what_is_broken(folder, group)
        if problem is None:
            if is_first(group):
                for note in [f"passed over a broken one: {problem}" for problem in broken] + (
                    [] if step is not None else _remarks(directory, iteration)
                ):
                    report(note)
            return folder
        broken.append(problem)
    if broken:
        raise CheckpointError(
            f"{directory} has no whole checkpoint to load: {'; '.join(broken)}. Load another or move it away"
        )
    return None


def saved_iterations(directory: Path) -> list[int]:
    """List the iterations that have a folder in a run's folder, newest first. Raises CheckpointError if unreadable."""
    try:
        names = [re.fullmatch(r"iter_(\d{7,})", path.name) for path in directory.iterdir() if path.is_dir()]
    except FileNotFoundError:
        if directory.is_symlink():
            raise CheckpointError(f"{directory} is a symlink that leads nowhere; name a run's folder") from None
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} is not a folder that can be read ({error}); name a run's folder") from error
    # Ignore names with more leading zeros than ours.
    found = {int(name[1]) for name in names if name}
    return sorted((step for step in found if checkpoint_folder(directory, step).is_dir()), reverse=True)


def _remarks(directory: Path, iteration: int) -> list[str]:
    """List unfinished saves, and a pointer file that names another iteration."""
    notes = [f"{path} was never finished; a later save removes it" for path in sorted(directory.glob("iter_*.tmp"))]
    pointer = directory / POINTER
    pointed = " ".join(pointer.read_text(encoding="utf-8", errors="replace").split()) if pointer.is_file() else ""
    if pointed and pointed != str(iteration):
        notes.append(f"{pointer} says {pointed[:20]}, the newest whole one is {iteration}; --ckpt-step loads another")
    return notes

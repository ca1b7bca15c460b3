"""What makes a checkpoint whole: its manifest, and the search for the newest folder that keeps to its own."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.agree import agree, from_first, is_first
from parallel.files import write_text

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
POINTER = "latest_checkpointed_iteration.txt"


class CheckpointError(ValueError):
    """A checkpoint cannot be written, is broken, or belongs to another model."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint folder must hold, and what it was made of."""

    iteration: int
    architecture: dict[str, Any]
    """The model's description, compared before a load."""
    extra: dict[str, Any]
    """The rest of the run's state, such as the consumed samples."""
    files: dict[str, tuple[int, str]]
    """Size in bytes and SHA-256 of every file in the folder but the manifest."""
    torch_version: str = str(torch.__version__)


def checkpoint_folder(directory: str | Path, iteration: int) -> Path:
    """The folder of an iteration's checkpoint in a run's folder."""
    return Path(directory) / f"iter_{iteration:07d}"


def describe(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json``, which carries a checksum of itself too, since all else is trusted through it."""
    # Once through JSON, so that the checksum is of what a reader gets (tuples and integer keys change on the way).
    content = json.loads(json.dumps({"format_version": FORMAT_VERSION, **asdict(manifest)}))
    content["checksum"] = _checksum(content)
    write_text(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def read_manifest(folder: str | Path) -> Manifest:
    """Read and check the manifest of a checkpoint folder; the files that it lists are not looked at.

    Raises:
        CheckpointError: it is missing, cut off, altered, of a newer format, or names a file outside its folder.
    """
    path = Path(folder) / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        checksum = content.pop("checksum")
        version = content.pop("format_version")
        intact = checksum == _checksum({"format_version": version, **content})
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a checkpoint without it was never finished") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}); load another one") from error
    if not intact:
        raise CheckpointError(f"{path} does not match its own checksum; it was altered, load another checkpoint")
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format {version}, this version reads {FORMAT_VERSION}; use a matching one")
    try:
        manifest = Manifest(**content)
        files = {name: (int(size), str(digest)) for name, (size, digest) in manifest.files.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint's manifest ({error}); load another one") from error
    for name in files:
        if name in ("", ".", "..") or name != os.path.basename(name):
            raise CheckpointError(f"{path} names {name!r}, which is not a file of its own folder; do not trust it")
    return Manifest(**{**content, "files": files})


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def what_is_broken(folder: Path, group: dist.ProcessGroup | None = None) -> str | None:
    """Check a checkpoint folder against its manifest; None if it is whole, else what is wrong, naming the files.

    Collective over ``group``: the files are divided over its ranks.
    """
    try:
        manifest = from_first(lambda: read_manifest(folder), group)
    except CheckpointError as error:
        return str(error)
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name][0], name))
    mine = by_size[rank::size]
    problems = agree(lambda: [_what_differs(folder / name, *manifest.files[name]) for name in mine], group)
    named = [problem for one_rank in problems for problem in one_rank if problem]
    return "; ".join(sorted(named)) or None


def _what_differs(path: Path, size: int, sha256: str) -> str | None:
    try:
        if not path.is_file():
            return f"{path} is missing"
        # The size comes first: it is free, and a hash of what has another size would be wasted.
        found = path.stat().st_size
        if found != size:
            return f"{path} has {found} bytes instead of {size}"
        return None if describe(path)[1] == sha256 else f"{path} has another SHA-256 than the manifest says"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"


def to_stderr(note: str) -> None:
    """Say what was broken where it does not mix with a run's output."""
    print(f"checkpoint: {note}", file=sys.stderr, flush=True)


def find_checkpoint(
    directory: str | Path,
    step: int | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    report: Callable[[str], None] = to_stderr,
) -> Path | None:
    """The newest whole checkpoint of a run's folder, every byte of it verified; None where there is none at all.

    Collective over ``group`` (default: all ranks). ``report`` is called on the first rank, once for each thing that a
    person should know: a broken checkpoint that was passed over, a save that never finished, a pointer file that
    names another iteration.

    Args:
        directory: a run's folder, with ``iter_*`` folders in it.
        step: take exactly this iteration.

    Raises:
        CheckpointError: ``step`` is missing or broken; or there are checkpoints and not one is whole, since starting
            afresh would lose the run silently.
    """
    directory = Path(directory)
    found = from_first(lambda: _iterations(directory), group)
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


def _iterations(directory: Path) -> list[int]:
    """Iterations that have a folder, newest first."""
    try:
        names = [re.fullmatch(r"iter_(\d{7,})", path.name) for path in directory.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} is not a folder that can be read ({error}); name a run's folder") from error
    # A name with more zeros than ours is not ours.
    found = {int(name[1]) for name in names if name}
    return sorted((step for step in found if checkpoint_folder(directory, step).is_dir()), reverse=True)


def _remarks(directory: Path, iteration: int) -> list[str]:
    """What a person may have expected otherwise."""
    notes = [f"{path} was never finished; a later save removes it" for path in sorted(directory.glob("iter_*.tmp"))]
    pointer = directory / POINTER
    pointed = pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else ""
    if pointed and pointed != str(iteration):
        notes.append(f"{pointer} says {pointed[:20]}, the newest whole one is {iteration}; --ckpt-step loads another")
    return notes

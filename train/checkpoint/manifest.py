"""The manifest of a checkpoint: its files with their checksums, and the run's state.

Everything else is verified against it: it has the size and SHA-256 of every file, and a checksum of
itself, so that a checkpoint that was cut off, altered or mixed with another is found before a byte
of it is loaded. It is JSON, so that it can be read without torch.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from runtime import __version__
from runtime.errors import UserError
from runtime.files import read_regular, reason, sha256, write_text

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
METADATA = ".metadata"  # DCP's table of tensors
STARTS = "starts.jsonl"
"""A file of a run's folder with a line for each start; the first line identifies the run."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, is broken, or belongs to another model."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the checkpoint."""
    try:
        yield
    except OSError as error:
        problem = reason(error, path.parent)
        raise CheckpointError(
            f"cannot write {path}: {problem}; free space there, or write to another folder"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a checkpoint folder, and the model and run state that they belong to."""

    iteration: int
    architecture: dict[str, Any]
    """Description of the model, which a load compares with the model to load into."""
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
    """Return True if a JSON value is a whole number that every JSON reader keeps exactly."""
    return type(value) is int and 0 <= value < 1 << 53


def describe(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a file."""
    return path.stat().st_size, sha256(path)


def remove(folder: Path, *, ignore_errors: bool = False) -> None:
    """Remove a checkpoint or a draft.

    The folder is renamed to a draft first: a kill then leaves a draft, not a broken checkpoint.

    Raises OSError if the folder cannot be renamed or, unless ``ignore_errors``, removed.
    """
    draft = folder.with_name(f"iter_{uuid.uuid4().hex[:8]}.tmp")
    folder.rename(draft)
    shutil.rmtree(draft, ignore_errors=ignore_errors)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` with a checksum of itself."""
    # Convert to JSON and back, which changes tuples and integer keys, so that the checksum is that
    # of the values that a reader gets.
    content = json.loads(json.dumps({"format_version": FORMAT_VERSION, **asdict(manifest)}))
    content["checksum"] = _checksum(content)
    write_text(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def read_manifest(folder: str | Path) -> Manifest:
    """Read and verify the manifest of a checkpoint folder, not the files that it lists.

    Raises CheckpointError if the manifest is missing, truncated, altered or of another format, or
    if it lists a file outside its folder.
    """
    path = Path(folder) / MANIFEST
    try:
        content = json.loads(read_regular(path))
        if not isinstance(content, dict):
            raise ValueError(f"{path.name} is not a JSON object")
        checksum = content.pop("checksum")
        version = content.pop("format_version")
        intact = checksum == _checksum({"format_version": version, **content})
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing, so the checkpoint was never finished; load another checkpoint"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}); load another checkpoint"
        ) from error
    if not intact:
        raise CheckpointError(
            f"{path} does not match its own checksum, so it was altered; load another checkpoint"
        )
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {version}, but this version of Longmesh reads {FORMAT_VERSION}; "
            "use the version that wrote it"
        )
    try:
        # Checkpoints of versions before 0.1.0 do not record the version.
        manifest = Manifest(**{"longmesh_version": "unknown", **content})
        manifest = replace(manifest, files=_checked_files(manifest))
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint's manifest ({error}); load another checkpoint"
        ) from error
    for name in manifest.files:
        if name in ("", ".", "..") or name != os.path.basename(name):
            raise CheckpointError(
                f"{path} lists {name!r}, which is not a file of its folder; do not trust "
                "this checkpoint"
            )
    return manifest


def _checked_files(manifest: Manifest) -> dict[str, tuple[int, str]]:
    """Return the files, each as a tuple. Raises ValueError or TypeError for a wrong value."""
    if not isinstance(manifest.architecture, dict) or not isinstance(manifest.extra, dict):
        raise ValueError("architecture or extra is not a table")

    files = {}
    counts = [("iteration", manifest.iteration)]
    for name, (size, digest) in manifest.files.items():
        files[name] = (size, digest)
        counts.append((name, size))
    for name, count in counts:
        if not is_count(count):
            raise ValueError(
                f"{name} has the value {count!r:.40}, which is not a whole number below 2^53"
            )

    for name, (_, digest) in sorted(files.items()):
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"{name} has no SHA-256")
    return files


def _checksum(content: dict[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True))

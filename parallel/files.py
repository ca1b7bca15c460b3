"""Files that appear whole and for good, or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """Temporary names in the paths' folders; what is written there bears the paths' names at the end, and stays.

    Files are fsynced before the renames and the folders after them. The names differ from each other only as the paths
    do, so that a .bin/.idx pair stays a pair. When the block raises, KeyboardInterrupt included, nothing stays and what
    stood at the paths is as before.

    Raises:
        OSError: a file cannot be written.
    """
    # Suffixes are kept, since readers choose by them. mkstemp would make the files private, against the umask.
    unique = uuid.uuid4().hex
    temporary = tuple(path.with_name(f".{path.stem}.{unique}{path.suffix}") for path in paths)
    renamed: list[Path] = []
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        for name in temporary:
            with name.open("rb+") as stream:
                os.fsync(stream.fileno())
        for name, path in zip(temporary, paths, strict=True):
            renamed.append(path)
            name.replace(path)
        renamed.clear()
        for folder in {path.parent for path in paths}:
            fsync_folder(folder)
    finally:
        # An interrupt between two renames must not leave a .bin beside another run's .idx.
        for name in (*temporary, *renamed):
            with suppress(OSError):
                name.unlink()


def write_text(path: Path, text: str) -> None:
    """Put a text file in place, in UTF-8: a reader sees the old content or the new, never a part."""
    with replacing(path) as (draft,):
        draft.write_text(text, encoding="utf-8")


def fsync_folder(path: Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

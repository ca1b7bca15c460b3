"""Fingerprint data files, so that a resumed run detects changed data; fast even for a terabyte."""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from runtime.files import sha256

SAMPLES = 64
SAMPLE_BYTES = 1 << 16


def digest(path: Path) -> str:
    """Return the SHA-256 of a whole file, cached until its size or mtime changes."""
    status = path.stat()
    return _digest(path, status.st_size, status.st_mtime_ns)


@cache
def _digest(path: Path, size: int, changed: int) -> str:
    return sha256(path)


def fingerprint(index: Path, contents: Sequence[Path]) -> str:
    """Return the SHA-256 of an index, the sizes of the files that it describes, and samples of their bytes.

    The samples are 64 blocks of 64 KiB, spread evenly over the concatenated files, first and last bytes included; up to
    4 MiB are read whole. Names and times do not count.
    """
    sizes = [path.stat().st_size for path in contents]
    found = hashlib.sha256(f"{digest(index)} {sizes}".encode())
    total = sum(sizes)
    starts = [number * max(0, total - SAMPLE_BYTES) // (SAMPLES - 1) for number in range(SAMPLES)]
    if total <= SAMPLES * SAMPLE_BYTES:
        starts = list(range(0, total, SAMPLE_BYTES))
    before = 0
    for path, size in zip(contents, sizes, strict=True):
        wanted = [start - before for start in starts if before - SAMPLE_BYTES < start < before + size]
        if wanted:
            with path.open("rb") as file:
                for start in wanted:
                    file.seek(max(0, start))
                    found.update(file.read(min(start, 0) + SAMPLE_BYTES))
        before += size
    return found.hexdigest()

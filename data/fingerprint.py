"""A digest of what files hold, by which a run that goes on knows its data again; fast for a terabyte too."""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from runtime.files import sha256

SAMPLES = 64
SAMPLE_BYTES = 1 << 16


def digest(path: Path) -> str:
    """SHA-256 of a whole file, computed once for as long as its size and time of change stay."""
    status = path.stat()
    return _digest(path, status.st_size, status.st_mtime_ns)


@cache
def _digest(path: Path, size: int, changed: int) -> str:
    return sha256(path)


def fingerprint(index: Path, contents: Sequence[Path]) -> str:
    """SHA-256 of an index, of the sizes of the files that it describes, and of samples of what they hold.

    The samples are 64 blocks of 64 KiB, evenly spread over the files one after the other, the first and the last bytes
    among them: up to 4 MiB are read whole, and of a terabyte no more. Names and times do not count.
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

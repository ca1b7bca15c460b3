"""Fingerprints of data files, by which a resumed run detects changed data, and digests of a
folder's arrays.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from runtime.errors import DataError
from runtime.files import sha256

SAMPLES = 64
SAMPLE_BYTES = 1 << 16
DIGESTS = "digests.json"


def digest(path: Path) -> str:
    """Return the SHA-256 of a whole file, cached until its size or mtime changes."""
    status = path.stat()
    return _digest(path, status.st_size, status.st_mtime_ns)


@cache
def _digest(path: Path, size: int, changed: int) -> str:
    return sha256(path)


def fingerprint(index: Path, contents: Sequence[Path]) -> str:
    """Return the SHA-256 of an index, the sizes of the files that it describes, and samples of
    their bytes.

    The samples are 64 blocks of 64 KiB, spread evenly over the concatenated files, first and last
    bytes included; up to 4 MiB are read whole. Names and times do not count.
    """
    sizes = [path.stat().st_size for path in contents]
    found = hashlib.sha256(f"{digest(index)} {sizes}".encode())
    total = sum(sizes)
    starts = [number * max(0, total - SAMPLE_BYTES) // (SAMPLES - 1) for number in range(SAMPLES)]
    if total <= SAMPLES * SAMPLE_BYTES:
        starts = list(range(0, total, SAMPLE_BYTES))
    before = 0
    for path, size in zip(contents, sizes, strict=True):
        wanted = [
            start - before for start in starts if before - SAMPLE_BYTES < start < before + size
        ]
        if wanted:
            with path.open("rb") as file:
                for start in wanted:
                    file.seek(max(0, start))
                    found.update(file.read(min(start, 0) + SAMPLE_BYTES))
        before += size
    return found.hexdigest()


def write_digests(folder: Path) -> None:
    """Write the SHA-256 of every .npy file of a folder into its digests.json."""
    digests = {path.name: sha256(path) for path in sorted(folder.glob("*.npy"))}
    (folder / DIGESTS).write_text(json.dumps(digests, indent=1), encoding="utf-8")


def check_digests(folder: Path) -> None:
    """Raise DataError if an array of the folder is missing, changed or not listed; names the file."""
    remedy = f"remove {folder}, which is then written anew"
    try:
        noted = dict(json.loads((folder / DIGESTS).read_text(encoding="utf-8")).items())
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(
            f"the index cache {folder} has no list of its files ({error}); {remedy}"
        ) from error
    there = {path.name for path in folder.glob("*.npy")}
    if odd := sorted(noted.keys() ^ there):
        what = "lacks" if odd[0] in noted else "has not noted"
        raise DataError(f"the index cache {folder} {what} {odd[0]!r}; {remedy}")
    for name, digest in noted.items():
        path = folder / name
        try:
            found = sha256(path)
        except OSError as error:
            raise DataError(
                f"{path} of the index cache cannot be read ({error.strerror}); {remedy}"
            ) from error
        if found != digest:
            raise DataError(
                f"{path} of the index cache is damaged: its SHA-256 is not the one noted; {remedy}"
            )

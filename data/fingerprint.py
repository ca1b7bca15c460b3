"""Fingerprints of data files, and digests of the arrays in a folder.

A resumed run compares the fingerprint of its data with that of its checkpoint: with other data, the
number of consumed samples means nothing. Reading terabytes at every start would be too slow, so a
fingerprint covers the whole index, which fixes all sizes, and samples of the content.
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
    """Return the SHA-256 of an index, the sizes of its content files, and samples of their bytes.

    The samples are 64 blocks of 64 KiB, spread evenly over the concatenated files, first and last
    bytes included; files of at most 4 MiB in total are read whole. Names and times do not count.
    """
    sizes = [path.stat().st_size for path in contents]
    total = sum(sizes)
    if total <= SAMPLES * SAMPLE_BYTES:
        starts = list(range(0, total, SAMPLE_BYTES))
    else:
        starts = [number * (total - SAMPLE_BYTES) // (SAMPLES - 1) for number in range(SAMPLES)]

    result = hashlib.sha256(f"{digest(index)} {sizes}".encode())
    bytes_before = 0  # bytes of the files before this one
    for path, size in zip(contents, sizes, strict=True):
        # A sample may begin in the previous file and end in this one.
        offsets = [start - bytes_before for start in starts if start < bytes_before + size]
        offsets = [offset for offset in offsets if offset > -SAMPLE_BYTES]
        if offsets:
            with path.open("rb") as file:
                for offset in offsets:
                    file.seek(max(0, offset))
                    result.update(file.read(min(offset, 0) + SAMPLE_BYTES))
        bytes_before += size
    return result.hexdigest()


def write_digests(folder: Path) -> None:
    """Write the SHA-256 of every .npy file of a folder into its digests.json."""
    digests = {path.name: sha256(path) for path in sorted(folder.glob("*.npy"))}
    (folder / DIGESTS).write_text(json.dumps(digests, indent=1), encoding="utf-8")


def check_digests(folder: Path) -> None:
    """Raise DataError if an array of the folder is missing, changed or not listed."""
    remedy = f"remove {folder}, and the next run writes it again"
    try:
        digests = dict(json.loads((folder / DIGESTS).read_text(encoding="utf-8")).items())
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(
            f"the index cache {folder} has no list of its files ({error}); {remedy}"
        ) from error

    present_names = {path.name for path in folder.glob("*.npy")}
    differing_names = sorted(digests.keys() ^ present_names)
    if differing_names:
        name = differing_names[0]
        problem = "lacks" if name in digests else "does not list"
        raise DataError(f"the index cache {folder} {problem} {name!r}; {remedy}")
    for name, expected in digests.items():
        path = folder / name
        try:
            actual = sha256(path)
        except OSError as error:
            raise DataError(
                f"{path} of the index cache cannot be read ({error.strerror}); {remedy}"
            ) from error
        if actual != expected:
            raise DataError(
                f"{path} of the index cache is damaged: its SHA-256 differs from the recorded one; "
                f"{remedy}"
            )

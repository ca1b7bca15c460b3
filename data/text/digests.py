"""Digests of a folder's arrays, to detect changes since they were written."""

import json
from pathlib import Path

from data.errors import DataError
from runtime.files import sha256

DIGESTS = "digests.json"


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
        raise DataError(f"the index cache {folder} has no list of its files ({error}); {remedy}") from error
    there = {path.name for path in folder.glob("*.npy")}
    if odd := sorted(noted.keys() ^ there):
        what = "lacks" if odd[0] in noted else "has not noted"
        raise DataError(f"the index cache {folder} {what} {odd[0]!r}; {remedy}")
    for name, digest in noted.items():
        path = folder / name
        try:
            found = sha256(path)
        except OSError as error:
            raise DataError(f"{path} of the index cache cannot be read ({error.strerror}); {remedy}") from error
        if found != digest:
            raise DataError(f"{path} of the index cache is damaged: its SHA-256 is not the one noted; {remedy}")

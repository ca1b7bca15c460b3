"""Digests of a folder's arrays, which tell that none of them has changed since they were written."""

import hashlib
import json
from pathlib import Path

from data.indexed import DataError

DIGESTS = "digests.json"


def write_digests(folder: Path) -> None:
    """Note the SHA-256 of every .npy file of a folder beside them."""
    digests = {path.name: _sha256(path) for path in sorted(folder.glob("*.npy"))}
    (folder / DIGESTS).write_text(json.dumps(digests, indent=1), encoding="utf-8")


def check_digests(folder: Path) -> None:
    """DataError for a file of the folder that is missing or not as it was written, naming it."""
    remedy = f"remove {folder}, which is then written anew"
    try:
        noted = json.loads((folder / DIGESTS).read_text(encoding="utf-8")).items()
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"the index cache {folder} has no list of its files ({error}); {remedy}") from error
    for name, digest in noted:
        path = folder / Path(name).name
        try:
            found = _sha256(path)
        except OSError as error:
            raise DataError(f"the index cache {folder} lacks {path.name} ({error.strerror}); {remedy}") from error
        if found != digest:
            raise DataError(f"{path} of the index cache is damaged: its SHA-256 is not the one noted; {remedy}")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

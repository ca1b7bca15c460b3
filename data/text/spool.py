"""Output on its way to a prefix: files that grow beside it, and a journal by which a killed run is gone on with."""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from data.errors import DataError, StoppedError

COMMIT_BYTES = 1 << 24
"""Output after which the journal is written."""


class Spool:
    """Files beside ``prefix``, by name, up to what the journal of a killed run with the same key has noted.

    They are removed at the end, and after an error of the input or before a first note; any other interruption keeps
    them.

    Args:
        key: what the output depends on; files of another key are written anew.
    """

    def __init__(self, prefix: Path, key: str, names: Sequence[str]) -> None:
        self.paths = {name: prefix.with_name(f".{prefix.name}.resume.{name}") for name in (*names, "journal")}
        self._key = key
        noted = self._noted()
        self.counts: Counter[str] = Counter(noted["counts"] if noted else {})
        """Sums that the journal keeps; 0 at first."""
        self._files = {name: self.paths[name].open("r+b" if noted else "w+b") for name in (*names, "journal")}
        for name, file in self._files.items():
            file.seek(*((noted["sizes"][name],) if noted and name != "journal" else (0, os.SEEK_END)))
            file.truncate()
        self._noted_once, self._since = bool(noted), 0

    def write(self, name: str, content: bytes) -> None:
        """Append to a file."""
        self._files[name].write(content)
        self._since += len(content)

    def flush(self) -> None:
        """Bring the files to the disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def note(self) -> None:
        """Let the files and the counts belong together now, if enough was written since the last time."""
        if self._since < COMMIT_BYTES:
            return
        self.flush()
        sizes = {name: file.tell() for name, file in self._files.items()}
        line = json.dumps({"key": self._key, "sizes": sizes, "counts": self.counts})
        self.write("journal", f"\n{line}\n".encode())
        self.flush()
        self._noted_once, self._since = True, 0

    def _noted(self) -> dict[str, Any] | None:
        """Return the journal's last whole line, if it has this key and the files are as long as it says."""
        try:
            lines = self.paths["journal"].read_text(encoding="utf-8", errors="replace").split("\n")
            sizes = {name: os.path.getsize(path) for name, path in self.paths.items()}
        except OSError:
            return None
        for line in filter(None, reversed(lines)):
            try:
                noted: dict[str, Any] = json.loads(line)
            except (ValueError, RecursionError):
                continue  # cut off as it was written
            return noted if self._fits(noted, sizes) else None
        return None

    def _fits(self, noted: Any, found: dict[str, int]) -> bool:
        """Return whether a line of the journal is of this key and of files as long as these."""
        if not isinstance(noted, dict) or noted.get("key") != self._key:
            return False
        sizes, counts = noted.get("sizes"), noted.get("counts")
        if not isinstance(sizes, dict) or not isinstance(counts, dict) or sizes.keys() != found.keys():
            return False
        numbers = all(type(number) is int and 0 <= number < 1 << 63 for number in (*sizes.values(), *counts.values()))
        return numbers and all(found[name] >= size for name, size in sizes.items())

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._files.values():
            with suppress(OSError):  # a full disk: what the journal has noted is there
                file.close()
        of_input = isinstance(error, DataError) and not isinstance(error, StoppedError)
        if error is None or of_input or not self._noted_once:
            for path in self.paths.values():
                path.unlink(missing_ok=True)
        else:
            print("what is done so far is kept; the same command goes on with it", file=sys.stderr)

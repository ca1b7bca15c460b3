"""Read training documents in a fixed order: the standard library's sources, text files, folders, rows of files."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.text.rows import has_rows, is_dataset, rows
from runtime.errors import DataError


@dataclass(eq=False)
class Corpus:
    """Iterate over the documents of `files` in order, up to `max_bytes` of UTF-8. Can be iterated repeatedly.

    A row of JSON lines, a JSON array, Parquet or a dataset is one document, under `json_key`; so is any other file.
    Empty documents are skipped.

    Raises:
        DataError: while iterating, a file cannot be read; names the file and the line.
    """

    files: Sequence[Path]
    max_bytes: int | None = None
    """Start no document once this many bytes are read; None reads all."""
    skip_undecodable: bool = False
    """List files that are not UTF-8 in `skipped` instead of raising."""
    json_key: str = "text"
    """Field of the rows that holds the text."""
    skipped: list[Path] = field(default_factory=list)

    def __iter__(self) -> Iterator[str]:
        self.skipped.clear()
        taken = 0
        for path in self.files:
            for text in self._documents(path):
                if self.max_bytes is not None and taken >= self.max_bytes:
                    return
                if text:
                    taken += len(text.encode())
                    yield text

    def _documents(self, path: Path) -> Iterator[str]:
        try:
            if has_rows(path):
                yield from (_text(where, row, self.json_key) for where, row in rows(path))
            else:
                yield path.read_bytes().decode()
        except OSError as error:
            raise DataError(f"cannot read {path} ({error.strerror}); remove it from the input") from error
        except UnicodeDecodeError as error:
            if not self.skip_undecodable:
                raise DataError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from error
            self.skipped.append(path)


_JSON_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}


def _text(where: str, found: Any, key: str) -> str:
    if isinstance(found, DataError):
        raise DataError(f"{where}: {found}")
    if not isinstance(found, dict):
        raise DataError(f'{where}: holds {_json_name(found)}, not an object with its text under "{key}"; repair it')
    if key not in found:
        fields = ", ".join(json.dumps(name, ensure_ascii=False) for name in list(found)[:8]) or "none"
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        raise DataError(
            f'{where}: has no field "{key}"; its fields are {fields}{more}: name the one that holds the text with '
            "--json-keys"
        )
    if not isinstance(text := found[key], str):
        raise DataError(
            f'{where}: field "{key}" is {_json_name(text)}, not text; repair it or name another: --json-keys'
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f'{where}: field "{key}" holds lone surrogates, which are no text ({error}); repair it'
        ) from error
    return text


def _json_name(value: object) -> str:
    return _JSON_NAMES.get(type(value), "a number")


def stdlib_folder() -> Path:
    """Return the folder of this interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files() -> list[Path]:
    """List the Python sources of the standard library, without test suites and installed packages."""
    root = stdlib_folder()
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    return _shuffled(root, (path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)))


def input_files(inputs: Sequence[str | os.PathLike[str]], suffix: str) -> list[Path]:
    """List the named files and datasets, and all files that end in `suffix` of the named folders.

    Raises DataError if one is missing.
    """
    files: list[Path] = []
    for path in map(Path, inputs):
        if is_dataset(path):
            files.append(path)
        elif path.is_dir():
            files += _shuffled(path, path.rglob(f"*{suffix}"))
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"input {path} does not exist; check the path")
    return files


def _shuffled(root: Path, paths: Iterable[Path]) -> list[Path]:
    """Order files by the hashes of their relative names: mixed, and the same everywhere.

    GPTDataset takes the validation split from the end, and max_bytes cuts there. Sorted by name, that would be the last
    packages of the alphabet, not a sample of all.
    """
    names = ((hashlib.sha256(path.relative_to(root).as_posix().encode()).digest(), path) for path in paths)
    return [path for _, path in sorted(names) if path.is_file()]

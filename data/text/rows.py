"""Rows of JSON lines, JSON arrays, Parquet and Hugging Face datasets, one at a time, each with where it stands.

The one place that knows of pyarrow and datasets, which are optional.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import DataError

HUB = "hf:"
"""Begins the name of a dataset on Hugging Face's hub, hf:NAME or hf:NAME:SPLIT, where a path is taken."""
Row = tuple[str, Any]
"""A row's place, such as "a.jsonl, line 3", and the row, or the DataError of a line that alone is broken."""
_CHUNK = 1 << 20
_GAP = re.compile(r"[\s,]*")
_DATASET_FILES = ("state.json", "dataset_dict.json")  # of datasets' save_to_disk


class Rows:
    """The rows of files and datasets, one after the other. Can be iterated repeatedly."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self.skipped: list[Path] = []
        """Files left out: none."""

    def __iter__(self) -> Iterator[Row]:
        for path in self.files:
            if not has_rows(path):
                raise DataError(f"{path} holds no rows; conversations are in .jsonl, .json, .parquet or a dataset")
            yield from rows(path)


def is_dataset(path: Path) -> bool:
    """Return whether a path is a dataset on the hub, or a folder that datasets' ``save_to_disk`` wrote."""
    return str(path).startswith(HUB) or any((path / name).is_file() for name in _DATASET_FILES)


def has_rows(path: Path) -> bool:
    """Return whether ``rows`` reads a path; any other file is one text."""
    return path.suffix in (".jsonl", ".json", ".parquet") or is_dataset(path)


def size_of(path: Path) -> int:
    """Return the bytes of a file or a folder; 0 for a dataset on the hub."""
    if str(path).startswith(HUB):
        return 0
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size


def rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file or a dataset in order, in memory that does not grow with it.

    Raises:
        DataError: a file that cannot be read, is cut off or of another format; a package that is not installed.
    """
    try:
        yield from _rows(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason}); convert it") from error
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}); remove it from the input") from error


def _rows(path: Path) -> Iterator[Row]:
    if is_dataset(path):
        yield from _dataset(path)
    elif path.suffix == ".jsonl":
        yield from _lines(path)
    elif path.suffix == ".json":
        yield from _array(path)
    else:
        yield from _parquet(path)


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if line.strip():
                try:
                    yield where, json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield where, DataError(f"not JSON in UTF-8 ({error}); repair it or leave it out")


def _array(path: Path) -> Iterator[Row]:
    """Yield the elements of an array, decoded from a piece of the file that doubles until an element is whole."""
    decode = json.JSONDecoder().raw_decode
    line, number, text, at = 1, 1, "", 0
    with path.open(encoding="utf-8") as file:
        while True:
            begin = _GAP.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing too
            line, at = line + text.count("\n", at, begin), begin
            if number == 1 and text.startswith("[", at):
                number, at = 2, at + 1
                continue
            if number > 1 and text.startswith("]", at):
                if (text[at + 1 :] + file.read()).strip():
                    raise DataError(f"{path}, line {line}: goes on after its array; make it one array, or a line each")
                return
            where = f"{path}, line {line}, element {number - 1}"
            try:
                if number == 1 and at < len(text):
                    raise DataError(f"{path}: holds no array of objects; give objects in [...], or a line each: .jsonl")
                row, end = decode(text, at)
            except (json.JSONDecodeError, RecursionError) as error:
                more = file.read(max(_CHUNK, len(text) - at))
                if not more:
                    raise DataError(f"{where}: not JSON, or cut off ({error}); repair it") from error
                text, at = text[at:] + more, 0
                continue
            yield where, row
            line, number, at = line + text.count("\n", at, end), number + 1, end


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(
            f"{path} is Parquet, which takes pyarrow: pip install pyarrow (make venv EXTRAS=data)"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except Exception as error:  # whatever its reader, and its numbers and times that Python has none for, raise
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path}: no Parquet, or cut off, after row {number} ({reason}); copy it again") from error


def _dataset(path: Path) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{path} takes datasets: pip install datasets (make venv EXTRAS=data)") from error
    name, _, split = str(path).removeprefix(HUB).partition(":")
    number, hub = 0, str(path).startswith(HUB)
    try:
        if hub:
            found = datasets.load_dataset(name, split=split or "train", streaming=True)
        elif isinstance(found := datasets.load_from_disk(str(path)), dict):
            raise DataError(f"{path} holds the splits {', '.join(found)}; give one: {path / next(iter(found))}")
        for number, row in enumerate(found, start=1):
            yield f"{path}, row {number}", row
    except DataError:
        raise
    except Exception as error:  # whatever its readers and the network raise
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path} cannot be read after row {number} ({reason}); check name and files") from error

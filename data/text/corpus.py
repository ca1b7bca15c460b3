"""Documents and rows of files in a fixed order: text, JSON lines, JSON arrays, Parquet, datasets,
folders of them.

The one place that knows of pyarrow and datasets, which are optional.
"""

import io
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.text.files import ROW_ENDINGS, form_of, opened, text_of
from runtime.errors import DataError, first_few
from runtime.files import sha256

HUB = "hf:"
"""Begins the name of a dataset on Hugging Face's hub, hf:NAME or hf:NAME:SPLIT, where a path is
taken.
"""
Row = tuple[str, Any]
"""A row's place, such as "a.jsonl, line 3", and the row, or the DataError of a line that alone is
broken.
"""
_CHUNK = 1 << 20
_GAP = re.compile(r"[\s,]*")
_DATASET_FILES = ("state.json", "dataset_dict.json")  # of datasets' save_to_disk
_JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
    type(None): "null",
}


@dataclass(eq=False)
class Corpus:
    """Iterate over the documents of `files` in order, up to `max_bytes` of UTF-8. Can be iterated
    repeatedly.

    A row of JSON lines, a JSON array, Parquet or a dataset is one document, under `json_key`; so is
    any other file. Empty documents are skipped. Raises DataError: while iterating, a file cannot be
    read; names the file and the line.
    """

    files: Sequence[Path]
    max_bytes: int | None = None
    """Start no document once this many bytes are read; None reads all."""
    skip_undecodable: bool = False
    """List files that are not UTF-8 in `skipped` instead of raising."""
    json_key: str = "text"
    """Field of the rows that holds the text."""
    skipped: list[Path] = field(default_factory=list)
    _told: set[Path] = field(default_factory=set)

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
        if has_rows(path):
            yield from (_text(where, row, self.json_key) for where, row in rows(path))
            return
        try:
            text = text_of(path)
        except DataError as error:
            if not (self.skip_undecodable and isinstance(error.__cause__, UnicodeDecodeError)):
                raise
            self.skipped.append(path)
            return
        if path not in self._told and _looks_like_rows(text):
            self._told.add(path)
            print(
                f"note: {path} is taken as one text, and is of JSON objects: name it .jsonl for rows",
                file=sys.stderr,
            )
        yield text


def _looks_like_rows(text: str) -> bool:
    """Return whether the first line of a text is a JSON object."""
    first, _, _ = text.lstrip().partition("\n")
    try:
        return first.startswith("{") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _text(where: str, found: Any, key: str) -> str:
    if isinstance(found, DataError):
        raise DataError(f"{where}: {found}")
    if not isinstance(found, dict):
        what = _name_of(found)
        raise DataError(
            f'{where}: holds {what}, not an object with its text under "{key}"; repair it'
        )
    if key not in found:
        fields = first_few([json.dumps(name, ensure_ascii=False) for name in found], 8) or "none"
        raise DataError(
            f'{where}: has no field "{key}"; its fields are {fields}: name the one that holds the text with --json-keys'
        )
    if not isinstance(text := found[key], str):
        what = _name_of(text)
        raise DataError(
            f'{where}: field "{key}" is {what}, not text; repair it or name another: --json-keys'
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f'{where}: field "{key}" holds lone surrogates, which are no text ({error}); repair it'
        ) from error
    return text


def _name_of(value: Any) -> str:
    """Say what a value is that is no text; Parquet has other types than JSON."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number"
    return _JSON_NAMES.get(type(value), f"of type {type(value).__name__}")


class Rows:
    """The rows of files and datasets, one after the other. Can be iterated repeatedly."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self.skipped: list[Path] = []
        """Files left out: none."""

    def __iter__(self) -> Iterator[Row]:
        for path in self.files:
            if not has_rows(path):
                raise DataError(
                    f"{path} holds no rows; conversations are in {ROW_ENDINGS} or a dataset"
                )
            yield from rows(path)


def stdlib_folder() -> Path:
    """Return the folder of this interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files() -> list[Path]:
    """List the Python sources of the standard library, without test suites and installed packages."""
    root = stdlib_folder()
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    return _shuffled(
        root,
        (path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)),
    )


def input_files(inputs: Sequence[str | os.PathLike[str]], suffix: str) -> list[Path]:
    """List the named files and datasets, and all files that end in `suffix` of the named folders.

    Raises DataError if one is missing.
    """
    files: list[Path] = []
    for path in map(Path, inputs):
        if is_dataset(path):
            files.append(path)
        elif path.is_dir():
            named = (file for file in path.rglob("*") if file.name.lower().endswith(suffix.lower()))
            files += _shuffled(path, named)
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"input {path} does not exist; check the path")
    return files


def _shuffled(root: Path, paths: Iterable[Path]) -> list[Path]:
    """Order files by the hashes of their relative names: mixed, and the same everywhere.

    GPTDataset takes the validation split from the end, and max_bytes cuts there. Sorted by name,
    that would be the last packages of the alphabet, not a sample of all.
    """
    names = ((sha256(path.relative_to(root).as_posix()), path) for path in paths)
    return [path for _, path in sorted(names) if path.is_file()]


def is_dataset(path: Path) -> bool:
    """Return whether a path is a dataset on the hub, or a folder that datasets' ``save_to_disk``
    wrote.
    """
    return str(path).startswith(HUB) or any((path / name).is_file() for name in _DATASET_FILES)


def has_rows(path: Path) -> bool:
    """Return whether ``rows`` reads a path; any other file is one text. Raises DataError
    (`form_of`).
    """
    return is_dataset(path) or form_of(path) != "text"


def size_of(path: Path) -> int:
    """Return the bytes of a file or a folder; 0 for a dataset on the hub."""
    if str(path).startswith(HUB):
        return 0
    return (
        sum(file.stat().st_size for file in path.rglob("*"))
        if path.is_dir()
        else path.stat().st_size
    )


def rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file or a dataset in order, in memory that does not grow with it.

    Raises DataError: a file that cannot be read, is cut off or of another format; a package that is
    not installed.
    """
    readers = {"lines": _lines, "json": _json, "parquet": _parquet}
    yield from (_dataset if is_dataset(path) else readers[form_of(path)])(path)


def _json(path: Path) -> Iterator[Row]:
    """Yield the elements of an array, or objects a line each, which many files that end in .json
    hold.
    """
    with opened(path) as (file, encoding):
        lines = io.TextIOWrapper(file, encoding, errors="replace")
        first = next(filter(str.strip, lines), "")
    yield from (_lines if _looks_like_rows(first) else _array)(path)


def _lines(path: Path) -> Iterator[Row]:
    with opened(path) as (file, encoding):
        # Bytes, as long as they are UTF-8: then a line that is not is refused by itself.
        lines: Iterable[bytes | str] = (
            file if encoding == "utf-8" else io.TextIOWrapper(file, encoding, newline="\n")
        )
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if line.strip():
                try:
                    yield where, json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield (
                        where,
                        DataError(
                            f"not JSON in {encoding.upper()} ({error}); repair it or leave it out"
                        ),
                    )


def _array(path: Path) -> Iterator[Row]:
    """Yield the elements of an array, decoded from a piece of the file that doubles until an
    element is whole.
    """
    decode = json.JSONDecoder().raw_decode
    line, number, text, at = 1, 1, "", 0
    with opened(path) as (stream, encoding):
        file = io.TextIOWrapper(stream, encoding)
        while True:
            begin = _GAP.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing too
            line, at = line + text.count("\n", at, begin), begin
            if number == 1 and text.startswith("[", at):
                number, at = 2, at + 1
                continue
            if number > 1 and text.startswith("]", at):
                if (text[at + 1 :] + file.read()).strip():
                    raise DataError(
                        f"{path}, line {line}: goes on after its array; make it one array, or a line each"
                    )
                return
            where = f"{path}, line {line}, element {number - 1}"
            try:
                if number == 1 and at < len(text):
                    raise DataError(
                        f"{path}: holds no array of objects; give objects in [...], or a line each: .jsonl"
                    )
                row, end = decode(text, at)
            except (json.JSONDecodeError, RecursionError) as error:
                more = file.read(max(_CHUNK, len(text) - at))
                if not more:
                    raise DataError(
                        f"{where}: not JSON, or cut off ({error}); repair it"
                    ) from error
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
    except (
        Exception
    ) as error:  # whatever its reader, and its numbers and times that Python has none for, raise
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{path}: no Parquet, or cut off, after row {number} ({reason}); copy it again"
        ) from error


def _dataset(path: Path) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{path} takes datasets: pip install datasets (make venv EXTRAS=data)"
        ) from error
    name, _, split = str(path).removeprefix(HUB).partition(":")
    number, hub = 0, str(path).startswith(HUB)
    try:
        if hub:
            found = datasets.load_dataset(name, split=split or "train", streaming=True)
        elif isinstance(found := datasets.load_from_disk(str(path)), dict):
            raise DataError(
                f"{path} holds the splits {', '.join(found)}; give one: {path / next(iter(found))}"
            )
        # A format that was saved with it would hide columns, or make tensors of them.
        for number, row in enumerate(found.with_format(None), start=1):
            yield f"{path}, row {number}", row
    except DataError:
        raise
    except Exception as error:  # whatever its readers and the network raise
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{path} cannot be read after row {number} ({reason}); check name and files"
        ) from error

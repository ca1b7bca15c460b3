"""Read the documents and rows of input files, in a fixed order.

Files are text, JSON lines, JSON arrays, Parquet, datasets, and folders of these. Only this module
imports pyarrow and datasets, which are optional. Everything is streamed: memory does not grow with
the size of a file, so that a corpus larger than memory can be prepared.
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
"""Prefix that names a dataset on Hugging Face's hub instead of a path: hf:NAME or hf:NAME:SPLIT."""
Row = tuple[str, Any]
"""A row's source, such as "a.jsonl, line 3", and the row or the DataError of a broken line."""
_CHUNK = 1 << 20
_GAP = re.compile(r"[\s,]*")
_DATASET_FILES = ("state.json", "dataset_dict.json")  # written by datasets' save_to_disk
_JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
    type(None): "null",
}


@dataclass(eq=False)
class Corpus:
    """The documents of `files` in order, up to `max_bytes` of UTF-8. Can be iterated repeatedly.

    A row of JSON lines, a JSON array, Parquet or a dataset is one document, under `json_key`; any
    other file is one document as a whole. Empty documents are skipped. Iterating raises DataError,
    with the file and the line, if a file cannot be read.
    """

    files: Sequence[Path]
    max_bytes: int | None = None
    """Stop before the next document once this many bytes are read; None reads everything."""
    skip_undecodable: bool = False
    """List files that are not UTF-8 in `skipped` instead of raising."""
    json_key: str = "text"
    """Field of the rows that holds the text."""
    skipped: list[Path] = field(default_factory=list)
    _noted: set[Path] = field(default_factory=set)

    def __iter__(self) -> Iterator[str]:
        self.skipped.clear()
        num_bytes = 0
        for path in self.files:
            for text in self._documents(path):
                if self.max_bytes is not None and num_bytes >= self.max_bytes:
                    return
                if text:
                    num_bytes += len(text.encode())
                    yield text

    def _documents(self, path: Path) -> Iterator[str]:
        if has_rows(path):
            for where, row in rows(path):
                yield _text(where, row, self.json_key)
            return
        try:
            text = text_of(path)
        except DataError as error:
            if not (self.skip_undecodable and isinstance(error.__cause__, UnicodeDecodeError)):
                raise
            self.skipped.append(path)
            return
        if path not in self._noted and _looks_like_rows(text):
            self._noted.add(path)
            print(
                f"note: {path} is read as a single text, but begins with a JSON object; rename it "
                "to .jsonl to read its lines as rows",
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


def _text(where: str, row: Any, key: str) -> str:
    """Return the text of a row. Raises DataError if it has no valid text."""
    if isinstance(row, DataError):
        raise DataError(f"{where}: {row}")
    if not isinstance(row, dict):
        raise DataError(
            f'{where}: holds {_name_of(row)}, not an object with its text under "{key}"; repair it'
        )
    if key not in row:
        names = [json.dumps(name, ensure_ascii=False) for name in row]
        raise DataError(
            f'{where}: has no field "{key}"; its fields are {first_few(names, 8) or "none"}: name '
            "the field that holds the text with --json-keys"
        )
    text = row[key]
    if not isinstance(text, str):
        raise DataError(
            f'{where}: field "{key}" is {_name_of(text)}, not text; repair it, or name another '
            "field with --json-keys"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f'{where}: field "{key}" has lone surrogates, which are not text ({error}); repair it'
        ) from error
    return text


def _name_of(value: Any) -> str:
    """Return the name of a value's type for messages; Parquet has types that JSON lacks."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number"
    return _JSON_NAMES.get(type(value), f"of type {type(value).__name__}")


class Rows:
    """The rows of files and datasets, one file after the other. Can be iterated repeatedly."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self.skipped: list[Path] = []
        """Files left out; always empty, since a file without rows is an error."""

    def __iter__(self) -> Iterator[Row]:
        for path in self.files:
            if not has_rows(path):
                raise DataError(
                    f"{path} has no rows; give conversations as {ROW_ENDINGS} or a dataset"
                )
            yield from rows(path)


def stdlib_folder() -> Path:
    """Return the folder of this interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files() -> list[Path]:
    """List the Python sources of the standard library, without tests and installed packages."""
    root = stdlib_folder()
    excluded = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    sources = []
    for path in root.rglob("*.py"):
        if not excluded & set(path.relative_to(root).parts):
            sources.append(path)
    return _shuffled(root, sources)


def input_files(inputs: Sequence[str | os.PathLike[str]], suffix: str) -> list[Path]:
    """List the named files and datasets, and all files with the `suffix` in the named folders.

    Raises DataError if one is missing.
    """
    files: list[Path] = []
    for path in map(Path, inputs):
        if is_dataset(path):
            files.append(path)
        elif path.is_dir():
            matches = [
                file for file in path.rglob("*") if file.name.lower().endswith(suffix.lower())
            ]
            files += _shuffled(path, matches)
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"input {path} does not exist; check the path")
    return files


def _shuffled(root: Path, paths: Iterable[Path]) -> list[Path]:
    """Sort files by the hashes of their relative names: shuffled, but the same on every machine.

    GPTDataset takes the validation split from the end, and max_bytes cuts the end off. Sorted by
    name, the end would be the last packages of the alphabet instead of a sample of all.
    """
    names = [(sha256(path.relative_to(root).as_posix()), path) for path in paths]
    return [path for _, path in sorted(names) if path.is_file()]


def is_dataset(path: Path) -> bool:
    """Return whether a path is a dataset: one on the hub, or a folder of ``save_to_disk``."""
    return str(path).startswith(HUB) or any((path / name).is_file() for name in _DATASET_FILES)


def has_rows(path: Path) -> bool:
    """Return whether a path has rows, for ``rows`` to read; any other file is a single text.

    Raises DataError under the same conditions as `form_of`.
    """
    return is_dataset(path) or form_of(path) != "text"


def size_of(path: Path) -> int:
    """Return the size in bytes of a file or a folder; 0 for a dataset on the hub."""
    if str(path).startswith(HUB):
        return 0
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*"))
    return path.stat().st_size


def rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file or a dataset in order.

    Memory does not grow with the file. Raises DataError if the file cannot be read, is cut off or
    has another format, or if a package is not installed.
    """
    if is_dataset(path):
        yield from _dataset(path)
        return
    readers = {"lines": _lines, "json": _json, "parquet": _parquet}
    yield from readers[form_of(path)](path)


def _json(path: Path) -> Iterator[Row]:
    """Yield the elements of a JSON array, or one object per line as in some .json files."""
    with opened(path) as (file, encoding):
        lines = io.TextIOWrapper(file, encoding, errors="replace")
        first = next(filter(str.strip, lines), "")
    if _looks_like_rows(first):
        yield from _lines(path)
    else:
        yield from _array(path)


def _lines(path: Path) -> Iterator[Row]:
    with opened(path) as (file, encoding):
        lines: Iterable[bytes | str] = file
        # Read UTF-8 as bytes, so that a line that is not valid UTF-8 is refused by itself.
        if encoding != "utf-8":
            lines = io.TextIOWrapper(file, encoding, newline="\n")
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row: Any
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                message = f"not JSON in {encoding.upper()} ({error}); repair or leave out the line"
                row = DataError(message)
            yield f"{path}, line {number}", row


def _array(path: Path) -> Iterator[Row]:
    """Yield the elements of an array.

    They are decoded from a buffer of the file. If the buffer ends inside an element, at least as
    much again is read, so an element of n characters is parsed O(log n) times.
    """
    decode = json.JSONDecoder().raw_decode
    text = ""
    position = 0
    line = 1
    number = 0  # number of the next element; 0 before the opening bracket
    with opened(path) as (stream, encoding):
        file = io.TextIOWrapper(stream, encoding)
        while True:
            begin = _GAP.match(text, position).end()  # type: ignore[union-attr]  # matches always
            line += text.count("\n", position, begin)
            position = begin
            if number == 0 and text.startswith("[", position):
                number = 1
                position += 1
                continue
            if number > 0 and text.startswith("]", position):
                if (text[position + 1 :] + file.read()).strip():
                    raise DataError(
                        f"{path}, line {line}: text follows the array; write one array, or one "
                        "object per line"
                    )
                return

            where = f"{path}, line {line}, element {number}"
            if number == 0 and position < len(text):
                raise DataError(
                    f"{path}: not an array of objects; write the objects in [...], or one per line "
                    "in a .jsonl"
                )
            try:
                row, end = decode(text, position)
            except (json.JSONDecodeError, RecursionError) as error:
                chunk = file.read(max(_CHUNK, len(text) - position))
                if not chunk:
                    raise DataError(
                        f"{where}: not JSON, or cut off ({error}); repair it"
                    ) from error
                text = text[position:] + chunk
                position = 0
                continue
            yield where, row
            line += text.count("\n", position, end)
            number += 1
            position = end


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(
            f"{path} is Parquet, but pyarrow cannot be imported; install it: pip install pyarrow "
            "(make venv EXTRAS=data)"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    # The reader raises many types, and so do numbers and times that Python cannot represent.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{path}: not Parquet, or cut off, after row {number} ({reason}); copy it again"
        ) from error


def _dataset(path: Path) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{path} needs the package datasets; install it: pip install datasets (make venv "
            "EXTRAS=data)"
        ) from error
    number = 0
    try:
        if str(path).startswith(HUB):
            name, _, split = str(path).removeprefix(HUB).partition(":")
            dataset = datasets.load_dataset(name, split=split or "train", streaming=True)
        else:
            dataset = datasets.load_from_disk(str(path))
            if isinstance(dataset, dict):
                example = path / next(iter(dataset))
                raise DataError(
                    f"{path} holds the splits {', '.join(dataset)}; give one, such as {example}"
                )
        # Ignore the dataset's saved format, which would hide columns or make tensors of them.
        for number, row in enumerate(dataset.with_format(None), start=1):
            yield f"{path}, row {number}", row
    except DataError:
        raise
    except Exception as error:  # the library's readers and the network raise many types
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{path} cannot be read after row {number} ({reason}); check its name and files"
        ) from error

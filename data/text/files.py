"""Detect the form, compression and encoding of input files, and open them."""

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from runtime.errors import DataError

Form = Literal["lines", "json", "parquet", "text"]
_FORMS: dict[str, Form] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jl", ".jsonlines", ".ldjson"), "lines"),
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
}
ROW_ENDINGS = ", ".join(_FORMS)
_LOADERS = {
    ".csv": '"csv", data_files="{path}"',
    ".tsv": '"csv", sep="\\t", data_files="{path}"',
    ".arrow": '"arrow", data_files="{path}"',
}
_OTHER_TABLES = (
    ".xlsx",
    ".xls",
    ".ods",
    ".feather",
    ".orc",
    ".avro",
    ".sqlite",
    ".db",
    ".npy",
    ".npz",
    ".pkl",
)
_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
_DECOMPRESSORS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda path: _by_arrow(path, "zstd"),
    ".lz4": lambda path: _by_arrow(path, "lz4"),
}
_MARKS = {  # longest first: the byte-order mark of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def form_of(path: Path) -> Form:
    """Return the format of a file from its extension; an unknown extension means text.

    Case, and an extension for compression, are ignored. Raises DataError if the file is a table or
    an archive, which would otherwise be trained on as one text.
    """
    endings = [suffix.lower() for suffix in path.suffixes[-2:]]
    if endings and endings[-1] in _DECOMPRESSORS:
        del endings[-1]
    ending = endings[-1] if endings else ""
    if ending in _ARCHIVES:
        raise DataError(f"{path} is an archive; unpack it and give its files")
    if ending in _LOADERS:
        loader = _LOADERS[ending].format(path=path)
        raise DataError(
            f"{path} is a table in an unsupported format; convert it to one of {ROW_ENDINGS}, for "
            f"example by datasets.load_dataset({loader}, "
            f'split="train").to_json("{path.with_suffix(".jsonl")}")'
        )
    if ending in _OTHER_TABLES:
        raise DataError(
            f"{path} is a table in an unsupported format; convert it to one of {ROW_ENDINGS}"
        )
    return _FORMS.get(ending, "text")


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    """Open and decompress a file, skip a UTF-8 byte-order mark; yield the stream and its encoding.

    Raises DataError if the file cannot be read, or if its compressed content is cut off.
    """
    open_file = _DECOMPRESSORS.get(path.suffix.lower(), lambda path: path.open("rb"))
    try:
        with open_file(path) as file:
            stream = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)
            yield stream, _encoding(stream)
    except UnicodeDecodeError as error:
        raise _undecodable(path, error, "") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise DataError(
            f"cannot read {path} ({reason}); repair it or remove it from the input"
        ) from error


def _encoding(stream: io.BufferedReader) -> str:
    """Return the encoding that the byte-order mark names, or UTF-8; skip a UTF-8 mark."""
    start = stream.peek(4)[:4]
    for mark, name in _MARKS.items():
        if not start.startswith(mark):
            continue
        if name == "utf-8-sig":
            stream.read(len(mark))
            return "utf-8"
        return name
    return "utf-8"


def text_of(path: Path) -> str:
    """Return a file's text without a byte-order mark.

    Raises DataError if the file cannot be read or decoded, or if it holds NUL characters.
    """
    with opened(path) as (file, encoding):
        content = file.read()
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        raise _undecodable(path, error, f" at byte {error.start}") from error
    if "\0" in text:
        raise DataError(
            f"{path} holds NUL characters, so it is not text; if it is UTF-16 without a byte-order "
            "mark, convert it to UTF-8"
        )
    return text


def _undecodable(path: Path, error: UnicodeDecodeError, where: str) -> DataError:
    return DataError(
        f"{path} is not {error.encoding.upper()} ({error.reason}{where}); convert it to UTF-8"
    )


def _by_arrow(path: Path, compression: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{path} is compressed with {compression}, but pyarrow cannot be imported; install it "
            "(pip install pyarrow, or make venv EXTRAS=data), or decompress the file"
        ) from error
    return pyarrow.input_stream(path, compression=compression)

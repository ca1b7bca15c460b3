"""Prepare text as Megatron's indexed token files: train a tokenizer, tokenise, write, or keep existing data."""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError
from data.text.corpus import Corpus, input_files, stdlib_files, stdlib_folder
from data.text.indexed import open_indexed, unwritable, writing
from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from runtime.files import InUseError, owned

_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 256, 1 << 22


@dataclass(frozen=True, kw_only=True)
class Request:
    """The settings that determine prepared data."""

    inputs: tuple[str, ...] = ()
    """Files and folders; empty means the standard library's sources."""
    suffix: str = ".txt"
    """Suffix of the files to read from a folder."""
    tokenizer_model: str | None = None
    """An existing tokenizer; None trains one."""
    vocab_size: int | None = 4096
    """Entries of the tokenizer to train; None with an existing one."""
    max_bytes: int | None = None
    """Bytes of text after which to stop; None reads all."""
    json_key: str = "text"
    """Field of a .jsonl file's objects that holds the text."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Facts about the data at a prefix."""

    tokenizer_sha256: str
    """SHA-256 of the tokenizer, which is the request's file or `prefix`.model, even if moved."""
    documents: int
    tokens: int
    """Tokens, including one end-of-document token per document."""
    dtype: str
    """Dtype of a token id."""
    text_bytes: int
    """UTF-8 bytes of the documents."""
    skipped_files: int
    """Files skipped because they are not UTF-8."""
    unigram_entropy: float
    """Nats per token: the loss of a model that knows only the token frequencies."""


def prepare(request: Request, prefix: Path, overwrite: bool = False, progress: bool = True) -> tuple[Prepared, bool]:
    """Write `prefix`.bin and .idx, .model if a tokenizer is trained, and .json, the record of the request.

    Complete data of the same request is kept. The files appear together at the end or not at all.

    Returns:
        Facts about the data, and whether it was kept.

    Raises:
        DataError: nothing to read, an unreadable file, a bad tokenizer, other data at the prefix, or another process
            writing there.
    """
    if not prefix.name:
        raise DataError(f"the output prefix {prefix} ends in no file name; give one such as runs/data/mine")
    try:
        if not overwrite and (kept := _existing(request, prefix)):
            return kept, True
        with ExitStack() as held:
            try:
                held.enter_context(owned(prefix.parent, prefix.name))
            except InUseError as error:
                raise DataError(f"cannot write {prefix}: {error}") from error
            except OSError as error:
                raise unwritable(prefix, error) from error
            if not overwrite and (kept := _existing(request, prefix)):  # another process finished it meanwhile
                return kept, True
            return _prepare(request, prefix, overwrite, progress), False
    except OSError as error:  # write errors are DataErrors by now
        raise DataError(f"cannot read {error.filename or prefix} ({error.strerror}); check that you may") from error


def _prepare(request: Request, prefix: Path, overwrite: bool, progress: bool) -> Prepared:
    files = input_files(request.inputs, request.suffix) if request.inputs else stdlib_files()
    corpus = Corpus(files, request.max_bytes, not request.inputs, request.json_key)
    # Read everything first: an unreadable file must fail now, not after hours of training a tokenizer.
    if not sum(1 for _ in _told(corpus, "checked", progress)):
        if request.inputs:
            raise DataError(
                f"there is no text in {', '.join(request.inputs)}; check the paths and --suffix {request.suffix}"
            )
        raise DataError(f"{stdlib_folder()} holds no Python sources on this machine; give other text by --input")
    trains = request.tokenizer_model is None
    ends = (".bin", ".idx", ".json", *((".model",) if trains else ()))
    with writing(*(_with_end(prefix, end) for end in ends)) as temporary:
        if request.tokenizer_model is None:
            if progress:
                print(f"training a tokenizer of {request.vocab_size} entries", file=sys.stderr)
            train_tokenizer(corpus, temporary[3].with_suffix(""), request.vocab_size or 4096)
        tokenizer = load_tokenizer(request.tokenizer_model or temporary[3])
        documents, tokens, text_bytes, counts = _write(corpus, temporary[0], temporary[1], tokenizer, progress)
        prepared = Prepared(
            tokenizer_sha256=tokenizer.sha256,
            documents=documents,
            tokens=tokens,
            dtype=open_indexed(temporary[0].with_suffix("")).dtype.name,
            text_bytes=text_bytes,
            skipped_files=len(corpus.skipped),
            unigram_entropy=_entropy(counts),
        )
        record = {"made_with": _made_with(request), "prepared": asdict(prepared), "python": sys.version}
        temporary[2].write_text(json.dumps(record, indent=1) + "\n")
        if overwrite:
            # The new .bin must never stand beside the old record.
            _with_end(prefix, ".json").unlink(missing_ok=True)
    return prepared


def write_indexed(documents: Iterable[str], prefix: Path, tokenizer: Tokenizer) -> None:
    """Tokenise `documents`, end each with `tokenizer.eod`, and write `prefix`.bin/.idx atomically.

    Raises:
        DataError: there are no documents, or the tokenizer gives an id outside its own vocabulary.
    """
    with writing(_with_end(prefix, ".bin"), _with_end(prefix, ".idx")) as (data, index):
        _write(documents, data, index, tokenizer, progress=False)


def _write(
    documents: Iterable[str], data: Path, index: Path, tokenizer: Tokenizer, progress: bool
) -> tuple[int, int, int, np.ndarray]:
    """Write the pair in place; return the numbers of documents, tokens and text bytes, and each id's count."""
    from data.text.megatron import megatron_core

    megatron = megatron_core()
    builder = megatron.IndexedDatasetBuilder(str(data), dtype=megatron.DType.optimal_dtype(tokenizer.vocab_size))
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    written = text_bytes = 0
    try:
        for batch in _batched(_told(documents, "tokenised", progress)):
            for ids in tokenizer.tokenize_batch(batch):
                array = np.array([*ids, tokenizer.eod], dtype=np.int64)
                # An id beyond the dtype would silently wrap around to another token's.
                if array.min() < 0 or array.max() >= tokenizer.vocab_size:
                    raise DataError(
                        f"the tokenizer gives id {array.max() if array.min() >= 0 else array.min()}, outside its "
                        f"{tokenizer.vocab_size} entries; use another tokenizer file"
                    )
                builder.add_document(array, [len(array)])
                counts += np.bincount(array, minlength=len(counts))
            written += len(batch)
            text_bytes += sum(len(text.encode()) for text in batch)
        if written == 0:
            raise DataError("there are no documents to write; check the input")
        builder.finalize(str(index))
    finally:
        builder.data_file.close()
    return written, int(counts.sum()), text_bytes, counts


def _told(documents: Iterable[str], done: str, progress: bool) -> Iterator[str]:
    """Yield the documents, and print to stderr every 2 s how many were `done`."""
    told, size = time.monotonic(), 0
    for count, text in enumerate(documents):
        if progress and time.monotonic() - told > 2:
            told = time.monotonic()
            print(f"{done} {size / 1e6:.1f} MB, {count} documents", file=sys.stderr)
        size += len(text.encode())
        yield text


def _batched(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def unigram_entropy(prefix: str | os.PathLike[str], limit: int = 1 << 26) -> float:
    """Return the entropy of the frequencies of the first `limit` tokens of `prefix`.bin, in nats per token.

    This is the loss of a model that knows only the token frequencies. Raises DataError (`open_indexed`).
    """
    ids = open_indexed(prefix).token_ids()[:limit]
    counts = np.zeros(1, dtype=np.int64)
    for start in range(0, len(ids), 1 << 22):
        block = np.bincount(ids[start : start + (1 << 22)], minlength=len(counts))
        block[: len(counts)] += counts
        counts = block
    return _entropy(counts)


def _entropy(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _existing(request: Request, prefix: Path) -> Prepared | None:
    """Return the data at the prefix if this request made it, None if there is none. Else raise DataError."""
    ends = [".bin", ".idx", ".json"] + ([".model"] if request.tokenizer_model is None else [])
    there = [str(path) for end in ends if (path := _with_end(prefix, end)).exists()]
    if not there:
        return None
    remedy = "give --overwrite to write it anew, or another --output-prefix"
    if len(there) < len(ends):
        raise DataError(f"{', '.join(there)} exists, but is not the whole of what this tool writes; {remedy}")
    record = _with_end(prefix, ".json")
    try:
        content: dict[str, Any] = json.loads(record.read_text())
        made_with, prepared = content["made_with"], Prepared(**content["prepared"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{record} is not a record of this tool ({error}); {remedy}") from error
    defaults = {"json_key": "text"}  # older records lack it
    for name, value in _made_with(request).items():
        if made_with.get(name, defaults.get(name)) != value:
            raise DataError(f"{prefix}.bin was made with {name} {made_with.get(name)}, not {value}; {remedy}")
    found = open_indexed(prefix)
    if (len(found.lengths), found.tokens) != (prepared.documents, prepared.tokens):
        raise DataError(f"{prefix}.idx and {record} disagree on the number of tokens; {remedy}")
    tokenizer = request.tokenizer_model or _with_end(prefix, ".model")
    if load_tokenizer(tokenizer).sha256 != prepared.tokenizer_sha256:
        raise DataError(f"{tokenizer} is not the tokenizer that wrote {prefix}.bin; {remedy}")
    return prepared


def _made_with(request: Request) -> dict[str, Any]:
    made_with = asdict(request)
    made_with["inputs"] = [os.path.abspath(path) for path in request.inputs]
    if request.tokenizer_model is not None:
        made_with["tokenizer_model"] = os.path.abspath(request.tokenizer_model)
    return made_with


def _with_end(prefix: Path, end: str) -> Path:
    return prefix.with_name(prefix.name + end)

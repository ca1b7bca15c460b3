"""Megatron's indexed token files: a `.bin` of token ids and an `.idx` that splits it into
documents.

Layout of the `.idx` (megatron.core.datasets.indexed_dataset, version 1), little-endian: magic (9
bytes), version (u64), dtype code (u8), number of sequences N (u64), number of document bounds D
(u64), lengths int32 [N] in tokens, pointers int64 [N] in bytes, document bounds int64 [D], and for
multimodal data a mode int8 [N].
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import DataError, StoppedError
from runtime.files import reason, replacing

LOSS_MASK = "_loss_mask"
"""Ends the prefix of the pair that says which tokens of conversations carry loss."""
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# Megatron's codes for dtypes that can hold token ids; 6 and 7 are floats.
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_BLOCK = 1 << 22
# Check this many ids from each end: all of them up to 134 million tokens, in well under a second.
# In larger corpora, where a full scan takes minutes, this still shows a wrong tokenizer or a
# damaged file; a bad id in between is caught when its sample is read.
_SCAN_TOKENS = 1 << 26
_REWRITE = "write the pair again (tools/prepare_data.py)"


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """A `.bin/.idx` pair whose sizes agree."""

    prefix: str
    """Path without .bin or .idx."""
    lengths: np.ndarray
    """Tokens of each sequence, int32 [sequences], memory-mapped; a document has one or several."""
    tokens: int
    """Tokens of all documents."""
    bounds: np.ndarray
    """Sequences before each document, then their total; int64 [documents + 1], memory-mapped."""
    dtype: np.dtype
    """Dtype of a token id in the `.bin`."""

    @cached_property
    def document_lengths(self) -> np.ndarray:
        """Tokens of each document of text, or of each conversation: int32 [documents]; see
        ``is_lumped``.

        Raises DataError: document bounds that do not ascend, or a document of 2^31 tokens or more.
        """
        _check_bounds(self)
        if not self.joins_sequences:
            return self.lengths
        begins = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))
        lengths = np.diff(begins[self.bounds])
        if lengths.max() > np.iinfo(np.int32).max:
            raise DataError(
                f"{self.prefix}.idx joins sequences to a document of {lengths.max():,} tokens, and a document has "
                f"less than 2^31; {_REWRITE}"
            )
        return lengths.astype(np.int32)

    @property
    def is_lumped(self) -> bool:
        """True if the `.idx` has one document of many sequences, as tools write that know of no
        documents.

        Each sequence then counts as a document, since else there would be none to shuffle and to
        split.
        """
        return len(self.bounds) == 2 and len(self.lengths) > 1

    @property
    def holds_conversations(self) -> bool:
        """True if tools/prepare_data.py --chat wrote it: a sequence is a conversation, and bounds
        are of samples.
        """
        return os.path.exists(f"{self.prefix}{LOSS_MASK}.idx")

    @cached_property
    def joins_sequences(self) -> bool:
        """True if documents are not the sequences, as of Megatron's --split-sentences."""
        if self.is_lumped or self.holds_conversations:
            return False
        return not np.array_equal(self.bounds, np.arange(len(self.lengths) + 1))

    def token_ids(self) -> np.ndarray:
        """Return all token ids, `dtype` [tokens], memory-mapped."""
        return np.memmap(f"{self.prefix}.bin", dtype=self.dtype, mode="r", shape=(self.tokens,))

    def check_tokenizer(self, path: str, sha256: str, settings: str | None) -> None:
        """Raise DataError if the record of tools/prepare_data.py beside the pair names another
        tokenizer.
        """
        prepared = prepared_record(self.prefix)
        if "tokenizer_sha256" not in prepared:
            return  # written by another tool
        noted, noted_settings = prepared["tokenizer_sha256"], prepared.get("tokenizer_settings")
        if noted != sha256:
            raise DataError(
                f"tokenizer {path} is damaged or another than the one that wrote {self.prefix}.bin (SHA-256 "
                f"{sha256[:12]}, noted {str(noted)[:12]}); give --tokenizer-model that one, or {_REWRITE}"
            )
        if noted_settings not in (None, settings):
            raise DataError(
                f"files beside tokenizer {path}, such as tokenizer_config.json, give it other special tokens or "
                f"settings than it had as {self.prefix}.bin was written; put them back, or {_REWRITE}"
            )


def prepared_record(prefix: str) -> dict[str, Any]:
    """Return what the record of tools/prepare_data.py beside a pair says of it; {} if there is none
    of ours.
    """
    record = Path(f"{prefix}.json")
    try:
        return (
            dict(json.loads(record.read_text(encoding="utf-8"))["prepared"])
            if record.is_file()
            else {}
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def open_indexed(prefix: str | os.PathLike[str]) -> Indexed:
    """Open `prefix`.bin/.idx after checking the `.idx`'s header and both files' sizes.

    Raises DataError: a file is missing, of another format, or of another size than the `.idx` says.
    """
    prefix = os.fspath(prefix)
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            text = prefix.removesuffix(LOSS_MASK)
            if text != prefix and Path(f"{text}.idx").is_file():
                raise DataError(
                    f"{path} does not exist; --sft reads conversations that tools/prepare_data.py --chat wrote, and "
                    f"{text} holds text: leave out --sft"
                )
            hint = (
                "give the prefix without .bin or .idx"
                if prefix.endswith((".bin", ".idx"))
                else "check the path"
            )
            raise DataError(
                f"{path} does not exist; {hint}, or write it with tools/prepare_data.py"
            )
    size = index.stat().st_size
    with index.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise DataError(
            f"{index} does not begin with Megatron's magic bytes, so it is no index; {_REWRITE}"
        )
    if len(header) < _HEADER.size:
        raise DataError(f"{index} is cut off inside its header ({size} bytes); {_REWRITE}")
    _, version, code, sequences, bounds = _HEADER.unpack(header)
    if version != 1:
        raise DataError(f"{index} has version {version}; only version 1 can be read; {_REWRITE}")
    if code not in _DTYPES:
        raise DataError(
            f"{index} has dtype code {code}, which holds no token ids ({sorted(_DTYPES)}); {_REWRITE}"
        )
    expected = _HEADER.size + 12 * sequences + 8 * bounds
    if size not in (expected, expected + sequences):
        raise DataError(
            f"{index} has {size} bytes, but {sequences} documents need {expected}; it is cut off or damaged: {_REWRITE}"
        )
    if sequences == 0:
        raise DataError(f"{index} holds no documents; {_REWRITE} from a corpus that is not empty")
    lengths = np.memmap(index, dtype="<i4", mode="r", offset=_HEADER.size, shape=(sequences,))
    tokens = int(lengths.sum(dtype=np.int64))
    dtype = np.dtype(_DTYPES[code])
    found = data.stat().st_size
    if found != tokens * dtype.itemsize or tokens == 0:
        raise DataError(
            f"{data} has {found} bytes, but {index} describes {tokens} tokens of {dtype.itemsize} bytes, "
            f"which is {tokens * dtype.itemsize}; {_REWRITE}"
        )
    offset = _HEADER.size + 12 * sequences
    # An empty array cannot be memory-mapped; `check_indexed` rejects it.
    ends = (
        np.memmap(index, dtype="<i8", mode="r", offset=offset, shape=(bounds,))
        if bounds
        else np.empty(0, "<i8")
    )
    return Indexed(prefix=prefix, lengths=lengths, tokens=tokens, bounds=ends, dtype=dtype)


def check_indexed(
    prefix: str | os.PathLike[str],
    vocab_size: int,
    scan_tokens: int = _SCAN_TOKENS,
    *,
    missing: Callable[[int], str | None] = lambda token: None,
) -> Indexed:
    """Open a pair, and check that the index's arrays agree and that token ids are inside the
    vocabulary.

    Args:
        prefix: path without .bin or .idx.
        vocab_size: ids must be in [0, vocab_size).
        scan_tokens: tokens to check at the head and at the tail of the `.bin`.
        missing: says of an id that the tokenizer has that the model lacks it; None for others.

    Raises DataError: names the file, what is wrong with it and the fix.
    """
    indexed = open_indexed(prefix)
    _check_arrays(indexed)
    ids = indexed.token_ids()
    head = min(indexed.tokens, scan_tokens)
    ends = (0, head), (max(head, indexed.tokens - scan_tokens), indexed.tokens)
    for start, stop in (
        (at, min(at + _BLOCK, end)) for begin, end in ends for at in range(begin, end, _BLOCK)
    ):
        block = ids[start:stop]
        if block.max() >= vocab_size or block.min() < 0:
            at = start + int(np.argmax((block >= vocab_size) | (block < 0)))
            document = int(
                np.searchsorted(np.cumsum(indexed.lengths, dtype=np.int64), at, side="right")
            )
            if (lacking := missing(int(ids[at]))) is not None:
                raise DataError(
                    f"{prefix}.bin, document {document}, token {at} of the file: {lacking}"
                )
            raise DataError(
                f"{prefix}.bin holds token id {ids[at]} (document {document}, token {at} of the file), but the "
                f"vocabulary has {vocab_size} entries; give --tokenizer-model the tokenizer that wrote it, or "
                f"{_REWRITE}"
            )
    return indexed


def id_type(vocab_size: int) -> np.dtype:
    """Return the dtype of token ids below `vocab_size`, as Megatron chooses it
    (DType.optimal_dtype).
    """
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.int32)


def write_index(
    path: Path,
    dtype: np.dtype,
    lengths: np.ndarray,
    bounds: Sequence[int] | np.ndarray | None = None,
) -> None:
    """Write an `.idx`, a block at a time.

    Args:
        dtype: of an id in the `.bin`.
        lengths: tokens of each of N sequences, int32 [N].
        bounds: sequences before each document, then their total; by default a sequence is a
            document.
    """
    code = next(code for code, found in _DTYPES.items() if np.dtype(found) == dtype)
    count, offset = len(lengths), 0
    bounds = range(count + 1) if bounds is None else bounds
    with path.open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, 1, code, count, len(bounds)))
        for start in range(0, count, _BLOCK):
            file.write(lengths[start : start + _BLOCK].astype("<i4").tobytes())
        for start in range(0, count, _BLOCK):
            sizes = lengths[start : start + _BLOCK].astype("<i8") * dtype.itemsize
            ends = offset + np.cumsum(sizes)
            file.write((ends - sizes).astype("<i8").tobytes())
            offset = int(ends[-1])
        for start in range(0, len(bounds), _BLOCK):
            file.write(np.array(bounds[start : start + _BLOCK], dtype="<i8").tobytes())


def token_counts(prefix: str | os.PathLike[str], limit: int = 1 << 26) -> np.ndarray:
    """Count each id among the first `limit` tokens of `prefix`.bin. Raises DataError
    (`open_indexed`).
    """
    indexed, counts = open_indexed(prefix), np.zeros(1, dtype=np.int64)
    size = min(indexed.tokens, limit)
    with open(f"{prefix}.bin", "rb") as file:  # a memory map would hold all of it
        for start in range(0, size, _BLOCK):
            block = np.bincount(
                np.fromfile(file, indexed.dtype, min(size - start, _BLOCK)), minlength=len(counts)
            )
            block[: len(counts)] += counts
            counts = block
    return counts


def entropy(counts: np.ndarray) -> float:
    """Return the entropy of frequencies in nats: the loss per token of a model that knows only
    these.
    """
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


class TokenReader:
    """Read a `.bin` in place of megatron.core's readers, and detect that it or its `.idx` is
    truncated meanwhile.

    With a truncated file, a memory map kills the process by SIGBUS, and megatron.core's other
    reader returns stale memory.
    """

    def __init__(self, prefix: str) -> None:
        self._paths = f"{prefix}.bin", f"{prefix}.idx"
        self._files = [open(path, "rb", buffering=0) for path in self._paths]  # noqa: SIM115
        self._sizes = [os.fstat(file.fileno()).st_size for file in self._files]

    def check(self) -> None:
        """Raise DataError if a file's size has changed since the start."""
        for path, file, size in zip(self._paths, self._files, self._sizes, strict=True):
            if (found := os.fstat(file.fileno()).st_size) != size:
                raise self._changed(path, size, found)

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """Read `count` token ids from byte `offset`; the interface of megatron.core's _BinReader."""
        size = count * np.dtype(dtype).itemsize
        found = os.pread(self._files[0].fileno(), size, offset)
        if len(found) < size:
            self.check()
            raise self._changed(self._paths[0], offset + size, offset + len(found))
        return np.frombuffer(found, dtype=dtype)

    def _changed(self, path: str, size: int, found: int) -> DataError:
        return DataError(
            f"{path} has {found} bytes, and had {size}: it was changed while it is read; {_REWRITE}"
        )


@contextmanager
def writing(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """Do as `runtime.files.replacing`, but raise StoppedError if a file cannot be written."""
    try:
        with replacing(*paths) as temporary:
            yield temporary
    except OSError as error:
        raise cannot_write(paths[0], error) from error


def cannot_write(path: Path, error: OSError) -> StoppedError:
    """Return the error for a file that cannot be written."""
    said = reason(error, path.parent)
    return StoppedError(
        f"cannot write {path} ({said}); free space or choose a folder that you can write to"
    )


def _check_arrays(indexed: Indexed) -> None:
    """Check that lengths, pointers and document bounds of the `.idx` describe one `.bin` without
    gaps.
    """
    index = f"{indexed.prefix}.idx"
    sequences = len(indexed.lengths)
    pointers = np.memmap(
        index, dtype="<i8", mode="r", offset=_HEADER.size + 4 * sequences, shape=(sequences,)
    )
    offset = 0
    for start in range(0, sequences, _BLOCK):
        lengths = indexed.lengths[start : start + _BLOCK].astype(np.int64)
        if lengths.min() < 0:
            raise DataError(
                f"{index} gives document {start + int(lengths.argmin())} a negative length; {_REWRITE}"
            )
        ends = offset + np.cumsum(lengths) * indexed.dtype.itemsize
        if not np.array_equal(
            pointers[start : start + _BLOCK], ends - lengths * indexed.dtype.itemsize
        ):
            raise DataError(f"{index} points into the .bin where its lengths do not; {_REWRITE}")
        offset = int(ends[-1])
    _check_bounds(indexed)


def _check_bounds(indexed: Indexed) -> None:
    bounds, sequences = indexed.bounds, len(indexed.lengths)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != sequences or (np.diff(bounds) < 0).any():
        raise DataError(
            f"{indexed.prefix}.idx has document bounds that do not ascend from 0 to {sequences}; {_REWRITE}"
        )

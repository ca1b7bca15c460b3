"""Open, check and write Megatron's indexed token files.

A pair is a `.bin` of token ids and an `.idx` that splits it into documents.

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
"""Suffix that names a second pair: the loss mask of conversations, 1 or 0 for each token."""
REWRITE = "write the pair again (tools/prepare_data.py)"
"""Advice in error messages about a broken pair."""
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# Megatron's codes for dtypes that can hold token ids; 6 and 7 are floats.
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_BLOCK = 1 << 22
# Check this many ids from each end: all of them up to 134 million tokens, in well under a second.
# In larger corpora, where a full scan takes minutes, this still shows a wrong tokenizer or a
# damaged file; a bad id in between is caught when its sample is read.
_SCAN_TOKENS = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """An opened `.bin/.idx` pair; the sizes of the two files agree."""

    prefix: str
    """Path of the pair, without .bin or .idx."""
    lengths: np.ndarray
    """Number of tokens of each sequence, int32 [sequences], memory-mapped; a document has one or
    several sequences."""
    tokens: int
    """Number of tokens of all documents together."""
    bounds: np.ndarray
    """Number of sequences before each document, then their total; int64 [documents + 1],
    memory-mapped."""
    dtype: np.dtype
    """Dtype of a token id in the `.bin`."""

    @cached_property
    def document_lengths(self) -> np.ndarray:
        """Number of tokens of each document of text, or of each conversation: int32 [documents].

        If ``is_lumped``, each sequence counts as a document. Raises DataError if document bounds do
        not ascend, or if a document has 2^31 tokens or more.
        """
        _check_bounds(self)
        if not self.joins_sequences:
            return self.lengths
        begins = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))
        lengths = np.diff(begins[self.bounds])
        if lengths.max() > np.iinfo(np.int32).max:
            raise DataError(
                f"{self.prefix}.idx combines sequences into a document of {lengths.max():,} "
                f"tokens, but a document must have fewer than 2^31; {REWRITE}"
            )
        return lengths.astype(np.int32)

    @property
    def is_lumped(self) -> bool:
        """True if the `.idx` has one document of many sequences.

        Tools that do not know documents write such files. Each sequence then counts as a document:
        with a single document there would be nothing to shuffle or to split.
        """
        return len(self.bounds) == 2 and len(self.lengths) > 1

    @property
    def holds_conversations(self) -> bool:
        """True if tools/prepare_data.py --chat wrote the pair.

        A sequence is then a conversation, and the document bounds are those of samples.
        """
        return os.path.exists(f"{self.prefix}{LOSS_MASK}.idx")

    @cached_property
    def joins_sequences(self) -> bool:
        """True if a document has several sequences, as with Megatron's --split-sentences."""
        if self.is_lumped or self.holds_conversations:
            return False
        return not np.array_equal(self.bounds, np.arange(len(self.lengths) + 1))

    def token_ids(self) -> np.ndarray:
        """Return all token ids, `dtype` [tokens], memory-mapped."""
        return np.memmap(f"{self.prefix}.bin", dtype=self.dtype, mode="r", shape=(self.tokens,))

    def check_tokenizer(self, path: str, sha256: str, settings: str | None) -> None:
        """Raise DataError if the record beside the pair names another tokenizer."""
        prepared = prepared_record(self.prefix)
        if "tokenizer_sha256" not in prepared:
            return  # written by another tool
        recorded = prepared["tokenizer_sha256"]
        if recorded != sha256:
            raise DataError(
                f"tokenizer {path} is not the one that wrote {self.prefix}.bin, or is damaged "
                f"(SHA-256 {sha256[:12]}, recorded {str(recorded)[:12]}); give --tokenizer-model "
                f"the tokenizer that wrote it, or {REWRITE}"
            )
        if prepared.get("tokenizer_settings") not in (None, settings):
            raise DataError(
                f"files beside tokenizer {path}, such as tokenizer_config.json, changed its "
                f"special tokens or settings after {self.prefix}.bin was written; restore them, "
                f"or {REWRITE}"
            )


def prepared_record(prefix: str) -> dict[str, Any]:
    """Return the facts that tools/prepare_data.py recorded next to a pair; {} without a record."""
    record = Path(f"{prefix}.json")
    try:
        if not record.is_file():
            return {}
        return dict(json.loads(record.read_text(encoding="utf-8"))["prepared"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def open_indexed(prefix: str | os.PathLike[str]) -> Indexed:
    """Open `prefix`.bin/.idx after checking the `.idx`'s header and both files' sizes.

    Raises DataError if a file is missing, has another format, or has another size than the `.idx`
    says.
    """
    prefix = os.fspath(prefix)
    index = Path(f"{prefix}.idx")
    data = Path(f"{prefix}.bin")
    _check_existence(prefix, index, data)
    code, sequences, num_bounds = _read_header(index)

    lengths = np.memmap(index, dtype="<i4", mode="r", offset=_HEADER.size, shape=(sequences,))
    tokens = int(lengths.sum(dtype=np.int64))
    dtype = np.dtype(_DTYPES[code])
    size = data.stat().st_size
    if size != tokens * dtype.itemsize or tokens == 0:
        raise DataError(
            f"{data} has {size} bytes, but {index} describes {tokens} tokens of {dtype.itemsize} "
            f"bytes, which take {tokens * dtype.itemsize}; {REWRITE}"
        )

    bounds: np.ndarray = np.empty(0, "<i8")
    if num_bounds:  # an empty array cannot be memory-mapped; `check_indexed` rejects it
        offset = _HEADER.size + 12 * sequences
        bounds = np.memmap(index, dtype="<i8", mode="r", offset=offset, shape=(num_bounds,))
    return Indexed(prefix=prefix, lengths=lengths, tokens=tokens, bounds=bounds, dtype=dtype)


def _check_existence(prefix: str, index: Path, data: Path) -> None:
    """Raise DataError if a file of the pair is missing."""
    for path in (index, data):
        if path.is_file():
            continue
        text = prefix.removesuffix(LOSS_MASK)
        if text != prefix and Path(f"{text}.idx").is_file():
            raise DataError(
                f"{path} does not exist; --sft reads conversations that tools/prepare_data.py "
                f"--chat wrote, but {text} holds text: leave out --sft"
            )
        hint = "check the path"
        if prefix.endswith((".bin", ".idx")):
            hint = "give the prefix without .bin or .idx"
        raise DataError(f"{path} does not exist; {hint}, or write it with tools/prepare_data.py")


def _read_header(index: Path) -> tuple[int, int, int]:
    """Return the dtype code, the number of sequences and the number of document bounds.

    Raises DataError if the header has another format, or if the file's size does not match it.
    """
    size = index.stat().st_size
    with index.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise DataError(
            f"{index} does not begin with Megatron's magic bytes, so it is not an index; {REWRITE}"
        )
    if len(header) < _HEADER.size:
        raise DataError(f"{index} is cut off inside its header ({size} bytes); {REWRITE}")

    _, version, code, sequences, bounds = _HEADER.unpack(header)
    if version != 1:
        raise DataError(f"{index} has version {version}; only version 1 can be read; {REWRITE}")
    if code not in _DTYPES:
        raise DataError(
            f"{index} has dtype code {code}, but token ids have one of {sorted(_DTYPES)}; {REWRITE}"
        )
    expected = _HEADER.size + 12 * sequences + 8 * bounds
    if size not in (expected, expected + sequences):  # the larger has modes of multimodal data
        raise DataError(
            f"{index} has {size} bytes, but {sequences} sequences and {bounds} document bounds "
            f"need {expected}; it is cut off or damaged: {REWRITE}"
        )
    if sequences == 0:
        raise DataError(f"{index} has no documents; {REWRITE} from a corpus that is not empty")
    return code, sequences, bounds


def check_indexed(
    prefix: str | os.PathLike[str],
    vocab_size: int,
    scan_tokens: int = _SCAN_TOKENS,
    *,
    missing: Callable[[int], str | None] = lambda token: None,
) -> Indexed:
    """Open a pair; check that its arrays agree and that token ids are inside the vocabulary.

    Args:
        prefix: path without .bin or .idx.
        vocab_size: ids must be in [0, vocab_size).
        scan_tokens: number of tokens to check at the head and at the tail of the `.bin`.
        missing: returns a message for an id that the tokenizer has and the model lacks, else None.

    Raises DataError, with the file, the problem and the fix, if a check fails.
    """
    indexed = open_indexed(prefix)
    _check_arrays(indexed)
    ids = indexed.token_ids()
    head_end = min(indexed.tokens, scan_tokens)
    tail_begin = max(head_end, indexed.tokens - scan_tokens)

    for begin, end in ((0, head_end), (tail_begin, indexed.tokens)):
        for start in range(begin, end, _BLOCK):
            block = ids[start : min(start + _BLOCK, end)]
            if block.max() < vocab_size and block.min() >= 0:
                continue
            position = start + int(np.argmax((block >= vocab_size) | (block < 0)))
            ends = np.cumsum(indexed.lengths, dtype=np.int64)
            document = int(np.searchsorted(ends, position, side="right"))
            message = missing(int(ids[position]))
            if message is not None:
                raise DataError(
                    f"{prefix}.bin, document {document}, token {position} of the file: {message}"
                )
            raise DataError(
                f"{prefix}.bin holds token id {ids[position]} (document {document}, token "
                f"{position} of the file), but the vocabulary has {vocab_size} entries; give "
                f"--tokenizer-model the tokenizer that wrote it, or {REWRITE}"
            )
    return indexed


def id_type(vocab_size: int) -> np.dtype:
    """Return the dtype of token ids below `vocab_size`, as Megatron's DType.optimal_dtype does."""
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.int32)


def write_index(
    path: Path,
    dtype: np.dtype,
    lengths: np.ndarray,
    bounds: Sequence[int] | np.ndarray | None = None,
) -> None:
    """Write an `.idx`, a block at a time.

    Args:
        path: the file.
        dtype: dtype of an id in the `.bin`.
        lengths: number of tokens of each sequence, int32 [N].
        bounds: number of sequences before each document, then their total; by default each
            sequence is a document.
    """
    codes = {np.dtype(id_dtype): code for code, id_dtype in _DTYPES.items()}
    count = len(lengths)
    offset = 0
    if bounds is None:
        bounds = range(count + 1)

    with path.open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, 1, codes[dtype], count, len(bounds)))
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
    """Count each id among the first `limit` tokens of `prefix`.bin, int64 [largest id + 1].

    Raises DataError under the same conditions as `open_indexed`.
    """
    indexed = open_indexed(prefix)
    counts = np.zeros(1, dtype=np.int64)
    size = min(indexed.tokens, limit)
    with open(f"{prefix}.bin", "rb") as file:  # a memory map would keep the whole file in memory
        for start in range(0, size, _BLOCK):
            ids = np.fromfile(file, indexed.dtype, min(size - start, _BLOCK))
            total = np.bincount(ids, minlength=len(counts))
            total[: len(counts)] += counts
            counts = total
    return counts


def entropy(counts: np.ndarray) -> float:
    """Return the entropy of token counts in nats.

    It is the loss per token of a model that knows only the frequencies of tokens.
    """
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@contextmanager
def writing(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """Write files like `runtime.files.replacing`, but raise StoppedError if that is impossible."""
    try:
        with replacing(*paths) as drafts:
            yield drafts
    except OSError as error:
        raise cannot_write(paths[0], error) from error


def cannot_write(path: Path, error: OSError) -> StoppedError:
    """Return the error for a file that cannot be written."""
    message = reason(error, path.parent)
    return StoppedError(
        f"cannot write {path} ({message}); free space or choose a folder that you can write to"
    )


def _check_arrays(indexed: Indexed) -> None:
    """Check that the arrays of the `.idx` describe one `.bin` without gaps."""
    index = f"{indexed.prefix}.idx"
    itemsize = indexed.dtype.itemsize
    sequences = len(indexed.lengths)
    pointers = np.memmap(
        index, dtype="<i8", mode="r", offset=_HEADER.size + 4 * sequences, shape=(sequences,)
    )
    offset = 0
    for start in range(0, sequences, _BLOCK):
        lengths = indexed.lengths[start : start + _BLOCK].astype(np.int64)
        if lengths.min() < 0:
            document = start + int(lengths.argmin())
            raise DataError(f"{index} gives document {document} a negative length; {REWRITE}")
        ends = offset + np.cumsum(lengths) * itemsize
        if not np.array_equal(pointers[start : start + _BLOCK], ends - lengths * itemsize):
            raise DataError(f"{index} has pointers that contradict its lengths; {REWRITE}")
        offset = int(ends[-1])
    _check_bounds(indexed)


def _check_bounds(indexed: Indexed) -> None:
    bounds = indexed.bounds
    sequences = len(indexed.lengths)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != sequences or (np.diff(bounds) < 0).any():
        raise DataError(
            f"{indexed.prefix}.idx has document bounds that do not ascend from 0 to {sequences}; "
            f"{REWRITE}"
        )

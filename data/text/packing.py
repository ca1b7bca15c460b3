"""Whole documents packed into samples, of text and of conversations. S tokens of a sample.

Text is packed by its `.idx` alone, and the pair stays as it is. Only a document of more than S
tokens is cut, into fragments of S and a rest; a fragment is a document of its own, whose last label
is still the document's next token. Texts that end inside of a document of the `.idx` are not packed
apart, but told apart.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.text.documents import document_ends
from data.text.indexed import LOSS_MASK, Indexed, TokenReader, check_indexed, open_indexed
from runtime.errors import DataError

PADDING_DOCUMENT = 1024
"""Tokens of a document of padding: attention inside of it costs little, however much there is."""
FRAGMENT = np.dtype([("begin", "<i8"), ("length", "<i4"), ("more", "?"), ("first", "?")])
"""A document, or a part of one: the tokens before it in the `.bin`, its own, whether its document
goes on, and whether it begins its document."""


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Pack items into bins: each, the longest first, into the bin with the least room that is
    enough.

    It takes at most 11/9 of the least possible number of bins, and 1 more (Johnson et al. 1974,
    "Worst-case performance bounds for simple one-dimensional packing algorithms"); Ding et al.
    (2024, arXiv:2404.10830) train on such samples. All items of a length are placed at once, and
    into all bins of the same room: such a step at least halves the room, so that N items of D
    different lengths take O(N log N) to sort and O(D log^2 capacity) to place.

    Returns the bin of each item, int64 [N], given their lengths [N], each in [1, capacity]. Bins
    are numbered from 0, and the same lengths give the same bins.
    """
    order = np.argsort(-lengths.astype(np.int32), kind="stable")
    sizes, counts = (found[::-1].tolist() for found in np.unique(lengths, return_counts=True))
    rooms: list[int] = []  # ascending and distinct: the rooms that some bin has
    with_room: defaultdict[int, list[range]] = defaultdict(
        list
    )  # bins, the first to be filled last
    opened = 0
    placed = [
        (0, 0, 1, 0)
    ]  # of items in order: the first bin, the step to the next one, items of a bin, items
    for size, left in zip(sizes, counts, strict=True):
        while left:
            at = bisect_left(rooms, size)
            room = rooms[at] if at < len(rooms) else capacity
            each = min(room // size, left)
            if at == len(rooms):
                taken = range(opened, opened + left // each)
                opened = taken.stop
            else:
                bins = with_room[room].pop()
                few = min(len(bins), left // each)
                taken, rest = bins[-few:][::-1], bins[:-few]
                if rest:
                    with_room[room].append(rest)
                elif not with_room[room]:
                    del with_room[room], rooms[at]
            placed.append((taken.start, taken.step, each, each * len(taken)))
            left -= each * len(taken)
            if over := room - each * size:
                if over not in with_room:
                    insort(rooms, over)
                with_room[over].append(taken)
    first, step, each, items = np.array(placed, dtype=np.int64).T
    within = np.arange(len(lengths)) - np.repeat(np.cumsum(items) - items, items)
    found = np.empty(len(lengths), np.int64)
    found[order] = np.repeat(first, items) + np.repeat(step, items) * (
        within // np.repeat(each, items)
    )
    return found


def by_bin(bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return items by bin, ascending in each, int64 [N], and the items before each bin, then N:
    int64 [bins + 1].
    """
    return np.argsort(bins, kind="stable"), np.concatenate(
        ([0], np.cumsum(np.bincount(bins), dtype=np.int64))
    )


def packed_documents(
    lengths: np.ndarray, documents: np.ndarray, seq_length: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pack some documents of a file into samples of at most S tokens; a pure function of its
    arguments.

    The seed decides which of equally long fragments share a sample.

    Returns fragments sample by sample, FRAGMENT [F], and the fragments before each sample, then F;
    int64 [samples + 1].

    Args:
        lengths: tokens of all documents of the file, int32 [N]; one without any is in no sample.
        documents: numbers of those to pack, int [n].
    """
    begins = np.cumsum(lengths, dtype=np.int64)[documents] - lengths[documents]
    tokens = lengths[documents].astype(np.int64)
    counts = -(-tokens // seq_length)
    ends = np.cumsum(counts)
    before = seq_length * (np.arange(counts.sum()) - np.repeat(ends - counts, counts))
    left = np.repeat(tokens, counts) - before
    fragments = np.empty(len(before), FRAGMENT)
    fragments["begin"] = np.repeat(begins, counts) + before
    fragments["length"] = np.minimum(left, seq_length)
    fragments["more"] = left > seq_length
    fragments["first"] = before == 0
    drawn = np.random.default_rng(seed).permutation(len(fragments))
    items, bounds = by_bin(best_fit_decreasing(fragments["length"][drawn], seq_length))
    return fragments[drawn[items]], bounds


def write_packing(stem: Path, *packing: np.ndarray) -> None:
    """Write what `packed_documents` returned, as STEM_fragments.npy and STEM_bounds.npy."""
    for name, array in zip(("fragments", "bounds"), packing, strict=True):
        np.save(f"{stem}_{name}.npy", array)


def read_packing(stem: Path) -> tuple[np.ndarray, np.ndarray]:
    """Map what `write_packing` wrote. Raises OSError or ValueError."""
    fragments, bounds = (
        np.load(f"{stem}_{name}.npy", mmap_mode="r") for name in ("fragments", "bounds")
    )
    return fragments, bounds


class PackedSamples:
    """Samples of packed fragments of a pair, by number; `learned` is a pair that says what carries
    loss.
    """

    def __init__(
        self,
        indexed: Indexed,
        fragments: np.ndarray,
        bounds: np.ndarray,
        seq_length: int,
        learned: Indexed | None = None,
    ) -> None:
        self._fragments, self._bounds, self._seq_length = fragments, bounds, seq_length
        pairs = [indexed] if learned is None else [indexed, learned]
        self._readers = [(TokenReader(pair.prefix), pair.dtype) for pair in pairs]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._bounds) - 1

    @property
    def fill(self) -> float:
        """The share of places that hold tokens; the rest is padding."""
        return int(self._fragments["length"].sum(dtype=np.int64)) / (len(self) * self._seq_length)

    def check(self) -> None:
        """Raise DataError if a file's size has changed since the start."""
        for reader, _ in self._readers:
            reader.check()

    def sample(self, number: int | None, eod: int) -> dict[str, Tensor]:
        """Return a sample, or for None padding alone: `tokens`, `labels`, `loss_mask`, `starts`,
        each [S].

        A document's last token has no label, since the next one is another's. Padding is `eod`,
        without loss. In a document of text, `eod` ends a text, and another one begins; in
        conversations it may end a turn.
        """
        tokens = torch.full((self._seq_length,), eod)
        labels, loss_mask = tokens.clone(), torch.zeros(self._seq_length)
        starts, end = torch.zeros(self._seq_length, dtype=torch.bool), 0
        first, last = (0, 0) if number is None else self._bounds[number : number + 2]
        for begin, length, more, begins_document in self._fragments[first:last].tolist():
            ids, *learned = (
                torch.from_numpy(
                    reader.read(dtype.type, length + more, begin * dtype.itemsize).astype(np.int64)
                )
                for reader, dtype in self._readers
            )
            predicted = slice(end, end + max(0, length - 1 + more))
            tokens[end : end + length], labels[predicted] = ids[:length], ids[1:]
            if learned:
                loss_mask[predicted] = learned[0][1:].float()
            else:
                text_ends = document_ends(ids, eod, begins_document)[:-1]  # [predicted]
                loss_mask[predicted] = (~text_ends).float()
                starts[end + 1 : end + length] = text_ends[: length - 1]
            starts[end] = True
            end += length
        starts[end::PADDING_DOCUMENT] = True
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "starts": starts}


class Conversations(PackedSamples):
    """The packed conversations at a prefix, for ``--sft``; with ``check`` both pairs are read as by
    `check_indexed`.

    A sequence of the pair is a conversation, and a document is a sample. A second pair,
    PREFIX_loss_mask, has ones and zeros in the same places, which say what is learned. Padding is
    not in the files.

    Raises DataError: a broken pair, two that do not go together, or a sample longer than S.
    """

    def __init__(
        self,
        prefix: str,
        vocab_size: int,
        seq_length: int,
        check: bool,
        missing: Callable[[int], str | None] = lambda token: None,
    ) -> None:
        mask = prefix + LOSS_MASK
        self.indexed = (
            check_indexed(prefix, vocab_size, missing=missing) if check else open_indexed(prefix)
        )
        masked = check_indexed(mask, 2) if check else open_indexed(mask)
        if check and not (
            np.array_equal(masked.lengths, self.indexed.lengths)
            and np.array_equal(masked.bounds, self.indexed.bounds)
        ):
            raise DataError(
                f"{mask}.idx and {prefix}.idx are of different conversations; write them again"
            )
        begins = np.concatenate(([0], np.cumsum(self.indexed.lengths, dtype=np.int64)))
        self.longest = int(np.diff(begins[self.indexed.bounds]).max())
        """Tokens of the longest sample."""
        if self.longest > seq_length:
            raise DataError(
                f"{prefix} holds samples of {self.longest} tokens and seq_length is {seq_length}; give --seq-length "
                f"{self.longest}, or prepare the conversations with --seq-length {seq_length}"
            )
        whole = np.zeros(len(self.indexed.lengths), FRAGMENT)
        whole["begin"], whole["length"] = begins[:-1], self.indexed.lengths
        super().__init__(self.indexed, whole, self.indexed.bounds, seq_length, masked)


class PackedEpoch:
    """Samples [begin, end) in a random order, as an epoch of an EpochedDataset."""

    def __init__(
        self, samples: PackedSamples, begin: int, end: int, seed: int, eod: int, epoch: int
    ) -> None:
        self._samples, self._eod = samples, eod
        self._order = begin + np.random.default_rng((seed, epoch)).permutation(end - begin)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._order)

    def __getitem__(self, index: int | None) -> dict[str, Tensor]:
        """Return a sample, or for None padding alone."""
        return self._samples.sample(None if index is None else int(self._order[index]), self._eod)

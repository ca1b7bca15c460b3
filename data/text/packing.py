"""Pack whole documents and conversations into samples. A sample has S tokens.

Text is packed from the `.idx` alone; the pair of files does not change. A document longer than S
tokens is cut into fragments of S tokens and a shorter last one. A fragment is a document of its
own, except that its last label is the next token of the document it was cut from. A document of
the `.idx` that holds several texts is packed as a whole, and its texts are separated in the sample.

Packing depends on the lengths, S and the seed alone. The first process computes it once, in about
10 seconds for 10 million documents (docs/concepts/packed.md), and writes it into the index cache;
all others map it. Later epochs have the same samples in another order, so a reader in the middle of
a run has nothing to pack. Documents do not see each other, so the model does not notice which of
them share a sample.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.text.documents import document_ends
from data.text.indexed import LOSS_MASK, Indexed, check_indexed, open_indexed
from data.text.reader import TokenReader
from runtime.errors import DataError

PADDING_DOCUMENT = 1024
"""Padding is split into documents of at most this many tokens, to keep attention over it cheap."""
FRAGMENT = np.dtype([("begin", "<i8"), ("length", "<i4"), ("more", "?"), ("first", "?")])
"""Record of a document or a part of one. begin: number of tokens before it in the `.bin`; length:
its number of tokens; more: True if its document continues after it; first: True if it begins its
document."""


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Pack items into bins, the longest first, each into the fullest bin with enough room.

    It needs at most 11/9 of the optimal number of bins, plus 1 (Johnson et al. 1974, "Worst-case
    performance bounds for simple one-dimensional packing algorithms"); Ding et al. (2024,
    arXiv:2404.10830) train on such samples.

    All items of one length are placed together, into all bins with the same room. Each such step at
    least halves the room, so N items of D different lengths take O(N log N) to sort and O(D log^2
    capacity) to place: a corpus has millions of documents but only a few thousand lengths.

    Returns the bin of each item, int64 [N], given their lengths [N], each in [1, capacity]. Bins
    are numbered from 0, and the same lengths give the same bins.
    """
    order = np.argsort(-lengths.astype(np.int32), kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    rooms: list[int] = []  # the distinct free capacities of open bins, ascending
    bins_by_room: defaultdict[int, list[range]] = defaultdict(list)  # stacks, filled from the end
    num_bins = 0
    # Runs of equal items in `order`: first bin, step to the next bin, items per bin, all items.
    runs = [(0, 0, 1, 0)]

    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        num_remaining = count
        while num_remaining:
            slot = bisect_left(rooms, size)
            room = rooms[slot] if slot < len(rooms) else capacity
            per_bin = min(room // size, num_remaining)
            if slot == len(rooms):
                bins = range(num_bins, num_bins + num_remaining // per_bin)
                num_bins = bins.stop
            else:
                candidates = bins_by_room[room].pop()
                num_filled = min(len(candidates), num_remaining // per_bin)
                bins = candidates[-num_filled:][::-1]
                unused_bins = candidates[:-num_filled]
                if unused_bins:
                    bins_by_room[room].append(unused_bins)
                elif not bins_by_room[room]:
                    del bins_by_room[room], rooms[slot]

            runs.append((bins.start, bins.step, per_bin, per_bin * len(bins)))
            num_remaining -= per_bin * len(bins)
            new_room = room - per_bin * size
            if new_room:
                if new_room not in bins_by_room:
                    insort(rooms, new_room)
                bins_by_room[new_room].append(bins)

    first_bins, steps, per_bin_of_run, items = np.array(runs, dtype=np.int64).T  # [runs] each
    within_run = np.arange(len(lengths)) - np.repeat(np.cumsum(items) - items, items)
    bins_before = within_run // np.repeat(per_bin_of_run, items)
    bin_of_item = np.empty(len(lengths), np.int64)
    bin_of_item[order] = np.repeat(first_bins, items) + np.repeat(steps, items) * bins_before
    return bin_of_item


def by_bin(bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Group items by bin.

    Returns two arrays: the items bin by bin, ascending within a bin, int64 [N]; and the number of
    items before each bin, with N at the end, int64 [bins + 1].
    """
    items = np.argsort(bins, kind="stable")
    ends = np.cumsum(np.bincount(bins), dtype=np.int64)
    return items, np.concatenate(([0], ends))


def packed_documents(
    lengths: np.ndarray, documents: np.ndarray, seq_length: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pack a file's documents into samples of at most S tokens.

    The result depends only on the arguments. The seed decides which fragments of the same length
    share a sample; without a shuffle, neighbours in a sorted corpus would always be packed
    together.

    Returns two arrays: the fragments sample by sample, FRAGMENT [F]; and the number of fragments
    before each sample, with F at the end, int64 [samples + 1].

    Args:
        lengths: number of tokens of every document of the file, int32 [N]; empty documents are in
            no sample.
        documents: numbers of the documents to pack, int [n].
    """
    begins = np.cumsum(lengths, dtype=np.int64)[documents] - lengths[documents]
    tokens = lengths[documents].astype(np.int64)
    counts = -(-tokens // seq_length)  # fragments of each document
    ends = np.cumsum(counts)
    offsets = seq_length * (np.arange(counts.sum()) - np.repeat(ends - counts, counts))
    tokens_left = np.repeat(tokens, counts) - offsets

    fragments = np.empty(len(offsets), FRAGMENT)
    fragments["begin"] = np.repeat(begins, counts) + offsets
    fragments["length"] = np.minimum(tokens_left, seq_length)
    fragments["more"] = tokens_left > seq_length
    fragments["first"] = offsets == 0

    shuffled = np.random.default_rng(seed).permutation(len(fragments))
    items, bounds = by_bin(best_fit_decreasing(fragments["length"][shuffled], seq_length))
    return fragments[shuffled[items]], bounds


def write_packing(stem: Path, fragments: np.ndarray, bounds: np.ndarray) -> None:
    """Write the result of `packed_documents` as STEM_fragments.npy and STEM_bounds.npy."""
    np.save(f"{stem}_fragments.npy", fragments)
    np.save(f"{stem}_bounds.npy", bounds)


def read_packing(stem: Path) -> tuple[np.ndarray, np.ndarray]:
    """Memory-map the files of `write_packing`. Raises OSError or ValueError if that fails."""
    fragments = np.load(f"{stem}_fragments.npy", mmap_mode="r")
    bounds = np.load(f"{stem}_bounds.npy", mmap_mode="r")
    return fragments, bounds


class PackedSamples:
    """Samples of packed fragments, accessed by their number.

    Args:
        fragments: FRAGMENT [F], sample by sample.
        bounds: number of fragments before each sample, then F, int64 [samples + 1].
        learned: pair with the loss mask of conversations, 1 or 0 for each token; None for text.
    """

    def __init__(
        self,
        indexed: Indexed,
        fragments: np.ndarray,
        bounds: np.ndarray,
        seq_length: int,
        learned: Indexed | None = None,
    ) -> None:
        self._fragments = fragments
        self._bounds = bounds
        self._seq_length = seq_length
        pairs = [indexed] if learned is None else [indexed, learned]
        self._readers = [(TokenReader(pair.prefix), pair.dtype) for pair in pairs]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._bounds) - 1

    @property
    def fill(self) -> float:
        """Share of positions that have tokens; the rest is padding."""
        tokens = int(self._fragments["length"].sum(dtype=np.int64))
        return tokens / (len(self) * self._seq_length)

    def check(self) -> None:
        """Raise DataError if a file's size has changed since the start."""
        for reader, _ in self._readers:
            reader.check()

    def sample(self, number: int | None, eod: int) -> dict[str, Tensor]:
        """Return a sample, or a sample of only padding for None.

        It has `tokens`, `labels`, `loss_mask` and `starts`, each [S]. The last token of a
        document has no label: the next token belongs to another document, and predicting it would
        teach a model that documents continue at random. Padding is `eod`, without loss.

        In a document of text, `eod` ends a text and the next token begins another. In
        conversations it is not a boundary, since it may end a turn.
        """
        tokens = torch.full((self._seq_length,), eod)
        labels = tokens.clone()
        loss_mask = torch.zeros(self._seq_length)
        starts = torch.zeros(self._seq_length, dtype=torch.bool)
        fragments = self._fragments[:0]
        if number is not None:
            first, last = self._bounds[number : number + 2]
            fragments = self._fragments[first:last]

        end = 0
        for begin, length, continues, begins_document in fragments.tolist():
            # One more id if the document continues: the label of the fragment's last token.
            ids, *learned = self._read(begin, length + continues)
            predicted = slice(end, end + max(0, length - 1 + continues))
            tokens[end : end + length] = ids[:length]
            labels[predicted] = ids[1:]
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

    def _read(self, begin: int, count: int) -> list[Tensor]:
        """Read the same range of token positions from every file, int64 [count] each."""
        arrays = []
        for reader, dtype in self._readers:
            values = reader.read(dtype.type, count, begin * dtype.itemsize)
            arrays.append(torch.from_numpy(values.astype(np.int64)))
        return arrays


class Conversations(PackedSamples):
    """Packed conversations at a prefix, for ``--sft``.

    A sequence of the pair is a conversation, and a document of the pair is a sample. A second pair,
    PREFIX_loss_mask, holds a 1 for every token that carries loss and a 0 for every other.
    Padding is not stored, so the same files serve every sequence length that is long enough.

    With ``check`` both pairs are checked by `check_indexed`.

    Raises DataError if a pair is broken, the two pairs differ, or a sample is longer than S.
    """

    def __init__(
        self,
        prefix: str,
        vocab_size: int,
        seq_length: int,
        check: bool,
        missing: Callable[[int], str | None] = lambda token: None,
    ) -> None:
        mask_prefix = prefix + LOSS_MASK
        if check:
            self.indexed = check_indexed(prefix, vocab_size, missing=missing)
            mask = check_indexed(mask_prefix, 2)
        else:
            self.indexed = open_indexed(prefix)
            mask = open_indexed(mask_prefix)

        if check and not (
            np.array_equal(mask.lengths, self.indexed.lengths)
            and np.array_equal(mask.bounds, self.indexed.bounds)
        ):
            raise DataError(
                f"{mask_prefix}.idx and {prefix}.idx describe different conversations; "
                "write both again (tools/prepare_data.py --chat)"
            )
        begins = np.concatenate(([0], np.cumsum(self.indexed.lengths, dtype=np.int64)))
        self.longest = int(np.diff(begins[self.indexed.bounds]).max())
        """Number of tokens of the longest sample."""
        if self.longest > seq_length:
            raise DataError(
                f"{prefix} has samples of {self.longest} tokens, but seq_length is {seq_length}; "
                f"give --seq-length {self.longest}, or prepare the conversations with "
                f"--seq-length {seq_length}"
            )

        fragments = np.zeros(len(self.indexed.lengths), FRAGMENT)
        fragments["begin"] = begins[:-1]
        fragments["length"] = self.indexed.lengths
        super().__init__(self.indexed, fragments, self.indexed.bounds, seq_length, mask)


class PackedEpoch:
    """The samples [begin, end) in a random order, as an epoch of an EpochedDataset."""

    def __init__(
        self, samples: PackedSamples, begin: int, end: int, seed: int, eod: int, epoch: int
    ) -> None:
        self._samples = samples
        self._eod = eod
        self._order = begin + np.random.default_rng((seed, epoch)).permutation(end - begin)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._order)

    def __getitem__(self, index: int | None) -> dict[str, Tensor]:
        """Return a sample, or a sample of only padding for None."""
        number = None if index is None else int(self._order[index])
        return self._samples.sample(number, self._eod)

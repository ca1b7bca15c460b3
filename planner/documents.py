"""Documents of a micro-batch: of a typical one, for which a method is chosen, and of the one that takes most memory."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from data.loader import Batching, batches
from data.text.blend import cumulative_lengths
from data.text.config import blend, length_shares
from data.text.indexed import open_indexed
from data.text.megatron import build_datasets
from data.text.packing import PADDING_DOCUMENT, packed_documents
from data.tokenizer import load_tokenizer
from runtime.errors import UserError
from train.config.common import CommonConfig
from train.config.entries import DiTRunConfig

MOST = 1 << 20
"""Documents of a file to look at; of more, evenly spaced ones."""
DRAWN = 1 << 16
"""Documents to draw from, of all files together."""
FIRST = 32
"""Micro-batches of a run to read for the one that takes most memory."""


class DocumentsError(UserError):
    """Lengths of documents that are not known, or are none."""


def typical_documents(config: CommonConfig, lengths: tuple[int, ...] = ()) -> tuple[int, ...] | None:
    """Return the cumulative lengths of the documents of one micro-batch; None if documents do not attend apart.

    Drawn with a fixed seed as the dataset does: a shuffled stream of documents is cut into samples, or whole ones are
    fitted into them.

    Args:
        lengths: tokens of documents to draw from; by default those of the data's .idx files, by their weights.

    Raises:
        DocumentsError: lengths below 1, or no data to take them from.
        DataError: a file is missing or broken.
    """
    if not config.packed:
        return None
    if isinstance(config, DiTRunConfig):
        return config.sample_ends
    if lengths and min(lengths) < 1:
        raise DocumentsError(f"document_lengths has {min(lengths)}; a document has 1 token or more")
    if not lengths and not config.data.data_path:
        raise DocumentsError(
            "reset_attention_mask is set and data_path is empty, so that the documents' lengths are not known; give "
            "--data-path PREFIX, or state them: --document-lengths 300 2000 40000"
        )
    draw = np.array(lengths) if lengths else _lengths(config.data.data_path, config.data.blend_by_length)
    fill = _fitted if config.data.pack_documents else _cut
    return fill(np.random.default_rng(0), draw[draw > 0].astype(np.int64), config.sequence_length, config.joined_length)


def known_documents(config: CommonConfig) -> tuple[int, ...] | None:
    """Return ``typical_documents``, or whole samples where this machine has no lengths of the data's documents.

    Raises DataError: a file is broken.
    """
    paths = config.data.data_path
    read = not config.packed or isinstance(config, DiTRunConfig)
    if read or (paths and Path(f"{blend(paths)[0][0]}.idx").exists()):
        return typical_documents(config)
    return tuple(range(0, config.joined_length + 1, config.sequence_length))


def heaviest_documents(config: CommonConfig) -> tuple[int, ...] | None:
    """Return the cumulative lengths of the run's own micro-batch with the longest documents, as `typical_documents`.

    It is the one of the run's first FIRST whose squared lengths add up to most: a long document's rows travel farthest.

    Raises:
        DataError: data or tokenizer are missing or broken.
    """
    if not config.packed or isinstance(config, DiTRunConfig):
        return typical_documents(config)
    tokenizer, size = load_tokenizer(str(config.data.tokenizer_model)), config.train.micro_batch_size
    samples, _, _ = build_datasets(config.data, config.sequence_length, config.train.seed, tokenizer)
    reads = config.train.train_iters * (config.train.global_batch_size or size) // size
    steps = batches(samples, Batching(global_batch_size=size, micro_batch_size=size), 0)
    read = islice(steps, min(FIRST, reads))
    ends = [tuple(cumulative_lengths(step[0]["starts"].view(-1))) for step in read]
    return max(ends, key=lambda bounds: np.square(np.diff(bounds)).sum())


@lru_cache(maxsize=4)
def _lengths(data_path: tuple[str, ...], blend_by_length: tuple[str, ...]) -> np.ndarray:
    """Draw documents of every source, so many that their tokens are as its weight says; then of every length."""
    generator, (prefixes, weights) = np.random.default_rng(0), blend(data_path)
    lengths = [open_indexed(prefix).lengths for prefix in prefixes]
    lengths = [found[:: -(-len(found) // MOST)] for found in lengths]
    tokens = [float(found.sum(dtype=np.int64)) for found in lengths] if weights is None else weights
    drawn = _by_share(generator, lengths, tokens)
    if not blend_by_length:
        return drawn
    longer, shares = zip(*length_shares(blend_by_length), strict=True)
    bounds = pairwise((*longer, np.inf))
    return _by_share(generator, [drawn[(drawn >= a) & (drawn < b)] for a, b in bounds], shares)


def _by_share(generator: np.random.Generator, groups: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
    """Draw documents of every group that has some, whose tokens are as its share says."""
    found = [(share, group) for share, group in zip(shares, groups, strict=True) if len(group)]
    often = np.array([share / group.mean() for share, group in found])
    counts = np.ceil(DRAWN * often / often.sum()).astype(int)
    return np.concatenate([generator.choice(group, count) for (_, group), count in zip(found, counts, strict=True)])


def _cut(generator: np.random.Generator, lengths: np.ndarray, sample: int, joined: int) -> tuple[int, ...]:
    """Fill ``joined`` tokens from a point inside a document; samples end documents too."""
    drawn = generator.choice(lengths, 8 + 2 * joined // int(lengths.mean()))
    while drawn[1:].sum() < joined:
        drawn = np.concatenate((drawn, generator.choice(lengths, len(drawn))))
    ends = np.cumsum(drawn) - generator.integers(drawn[0])
    bounds = np.union1d(ends[ends < joined], np.arange(0, joined + 1, sample))
    return tuple(bounds.tolist())


def _fitted(generator: np.random.Generator, lengths: np.ndarray, sample: int, joined: int) -> tuple[int, ...]:
    """Take samples from 16 times as many, which whole documents fill as in a run of pack_documents, and padding."""
    drawn = generator.choice(lengths, 16 + 16 * joined // int(lengths.mean())).astype(np.int32)
    while drawn.sum(dtype=np.int64) < 16 * joined:
        drawn = np.concatenate((drawn, generator.choice(lengths, len(drawn)).astype(np.int32)))
    fragments, bounds = packed_documents(drawn, np.arange(len(drawn)), sample, 0)
    found = set[int]()
    for place, number in enumerate(generator.choice(len(bounds) - 1, joined // sample, replace=False)):
        ends = np.cumsum(fragments["length"][bounds[number] : bounds[number + 1]]).tolist()
        found |= {place * sample + start for start in (0, *ends, *range(ends[-1], sample, PADDING_DOCUMENT))}
    return tuple(sorted(found | {joined}))

"""Every item is in one bin, none is too full, and few are needed.

Samples hold every token once, labels their own.
"""

import random
from collections import Counter
from itertools import chain, pairwise
from time import process_time

import numpy as np
import pytest
import torch

from data.loader import IGNORE_INDEX, Batching, batches
from data.text.config import DataConfig
from data.text.megatron import build_datasets
from data.text.packing import PADDING_DOCUMENT, best_fit_decreasing, by_bin, packed_documents
from runtime.errors import DataError
from tests.data.text.corpora import (
    EOD,
    VOCAB_SIZE,
    NumberTokenizer,
    counting_documents,
    write_documents,
)

SEQ = 40
LENGTHS = [13, 40, 1, 97, 41, 2, 80, 5, 5, 5, 39, 120, 7, 19, 0, 22, 11, 3, 60, 8]


def naive(lengths, capacity):
    """The same rule, by looking at every bin."""
    bins = []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        rooms = [capacity - sum(lengths[i] for i in items) for items in bins]
        fits = [room for room in rooms if room >= lengths[item]]
        if fits:
            bins[rooms.index(min(fits))].append(item)
        else:
            bins.append([item])
    return bins


def fitted(lengths, capacity):
    items, bounds = by_bin(best_fit_decreasing(np.array(lengths, np.int32), capacity))
    return [items[begin:end].tolist() for begin, end in pairwise(bounds)]


def test_bins_are_those_of_the_rule():
    draw = random.Random(0)
    for count in (0, 1, 7, 60, 300):
        for capacity, longest in ((1, 1), (8, 8), (8, 3), (100, 100), (100, 5)):
            lengths = [draw.randint(1, longest) for _ in range(count)]
            bins = fitted(lengths, capacity)
            rooms = [sorted(lengths[i] for i in items) for items in bins]
            assert sorted(i for items in bins for i in items) == list(range(count))
            assert all(items == sorted(items) for items in bins)
            assert max((sum(room) for room in rooms), default=0) <= capacity
            want = [sorted(lengths[i] for i in items) for items in naive(lengths, capacity)]
            assert sorted(map(sum, rooms)) == sorted(map(sum, want))


def test_a_full_bin_has_no_padding():
    assert fitted([3, 6, 7, 4], 10) == [[0, 2], [1, 3]]


def pieces(lengths, documents, seq_length, seed):
    """Return (first token, tokens, goes on) of each fragment, by sample."""
    fragments, bounds = packed_documents(
        np.array(lengths, np.int32), np.array(documents), seq_length, seed
    )
    triples = fragments[["begin", "length", "more"]]
    return [triples[begin:end].tolist() for begin, end in pairwise(bounds)]


def test_each_token_of_the_documents_is_in_one_sample_and_no_document_is_cut_that_fits():
    ends = np.cumsum(LENGTHS)
    documents = [number for number in range(len(LENGTHS)) if number != 4]
    samples = pieces(LENGTHS, documents, SEQ, 1)
    counts = Counter(
        token for begin, length, _ in chain(*samples) for token in range(begin, begin + length)
    )
    assert counts == Counter(
        token for d in documents for token in range(ends[d] - LENGTHS[d], ends[d])
    )
    assert all(0 < sum(length for _, length, _ in sample) <= SEQ for sample in samples)
    wholes = {
        (int(ends[d]) - LENGTHS[d], LENGTHS[d], False) for d in documents if 0 < LENGTHS[d] <= SEQ
    }
    assert wholes <= set(chain(*samples))
    assert [
        (begin, length) for begin, length, more in chain(*samples) if more and length != SEQ
    ] == []
    assert sum(more for _, _, more in chain(*samples)) == sum(
        -(-LENGTHS[d] // SEQ) - 1 for d in documents if LENGTHS[d]
    )


def test_packing_is_a_function_of_lengths_and_seed_and_its_number_of_samples_of_the_lengths_alone():
    lengths, every = [7] * 50 + [13] * 50, range(100)
    first, again, other = (pieces(lengths, every, SEQ, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == len(other)


@pytest.mark.parametrize(
    ("count", "seq_length"),
    [(20_000, 4096), (20_000, 32768), pytest.param(10_000_000, 32768, marks=pytest.mark.slow)],
)
def test_log_normal_lengths_are_packed_with_little_padding_within_a_minute(count, seq_length):
    """10 million of them: the bound of README and docs/concepts/packed.md."""
    lengths = np.maximum(1, np.exp(np.random.default_rng(0).normal(7.0, 1.6, count))).astype(
        np.int32
    )
    start = process_time()
    fragments, bounds = packed_documents(lengths, np.arange(count, dtype=np.int32), seq_length, 1)
    seconds, tokens = process_time() - start, lengths.sum(dtype=np.int64)
    padding = 1 - tokens / ((len(bounds) - 1) * seq_length)
    print(
        f"{count:,} documents in {len(bounds) - 1:,} samples: {seconds:.1f} s, {padding:.6%} "
        f"padding"
    )
    assert fragments["length"].sum(dtype=np.int64) == tokens
    assert padding < 0.001
    assert seconds < 60


def build(prefix, seq=SEQ, seed=1, **config):
    paths = prefix if isinstance(prefix, tuple) else (prefix,)
    settings = {"split": "100,0,0", "pack_documents": True, **config}
    return build_datasets(DataConfig(data_path=paths, **settings), seq, seed, NumberTokenizer())


def texts(lengths, first=1):
    """Documents of ids that are used once each, but for their ends."""
    ids = iter(range(first, VOCAB_SIZE))
    return [[*(next(ids) for _ in range(length - 1)), EOD][:length] for length in lengths]


@pytest.fixture
def prefix(tmp_path):
    return write_documents(tmp_path / "d", texts(LENGTHS))


def read(sample):
    """Return (tokens, labels with loss) of each document of a sample."""
    bounds = [*sample["starts"].nonzero().flatten().tolist(), len(sample["starts"])]
    learned = sample["labels"].where(sample["loss_mask"] > 0, IGNORE_INDEX)
    return [(sample["tokens"][a:b].tolist(), learned[a:b].tolist()) for a, b in pairwise(bounds)]


def test_an_end_inside_a_document_of_text_begins_another_text(tmp_path):
    """It predicts nothing of the next text, whose tokens do not see those before it."""
    first, second = [5, 6, EOD], [7, 8, 9, EOD]
    train = build(write_documents(tmp_path / "d", [first + second]), seq=12)[0]
    assert read(train[0])[:2] == [(text, [*text[1:], IGNORE_INDEX]) for text in (first, second)]


def test_padding_is_short_documents_without_loss(tmp_path):
    train = build(write_documents(tmp_path / "d", texts([10])), seq=3000)[0]
    assert train[0]["starts"].nonzero().flatten().tolist() == [
        0,
        *range(10, 3000, PADDING_DOCUMENT),
    ]
    assert train[0]["loss_mask"].sum() == 9


def test_epochs_have_the_same_samples_in_other_orders_and_any_sample_is_read_alone(
    prefix, tmp_path
):
    train, size = build(prefix)[0], len(build(prefix)[0])
    epochs = [[train[e * size + n]["tokens"].tolist() for n in range(size)] for e in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    again = build(prefix, data_cache_path=str(tmp_path / "other"))[0]
    assert [again[n]["tokens"].tolist() for n in reversed(range(3 * size))] == list(chain(*epochs))[
        ::-1
    ]
    resumed = batches(again, Batching(global_batch_size=2, micro_batch_size=1, num_workers=1), 4)
    assert [batch["tokens"][0].tolist() for batch in next(resumed)] == list(chain(*epochs))[4:6]


def test_the_cache_is_of_this_file_and_these_flags(prefix, tmp_path):
    cache = tmp_path / "d" / "cache"
    build(prefix)
    (folder,) = cache.iterdir()
    build(prefix, seed=2), build(prefix, seq=SEQ + 1), build(prefix, pack_documents=False)
    assert len(list(cache.iterdir())) == 4
    write_documents(tmp_path / "d", texts(LENGTHS[::-1]))
    assert len(build(prefix)[0]) > 0
    assert len(list(cache.iterdir())) == 5
    damaged = folder / "train-0_bounds.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")
    write_documents(tmp_path / "d", texts(LENGTHS))
    with pytest.raises(DataError, match=r"train-0_bounds\.npy of the index cache is damaged"):
        build(prefix)


def test_splits_are_of_documents_and_each_is_packed(tmp_path):
    documents = counting_documents(40)
    train, valid, _ = build(write_documents(tmp_path / "d", documents), split="90,10,0", seq=55)
    for dataset, expected_documents in ((train, documents[:36]), (valid, documents[36:])):
        ids = [
            tokens
            for n in range(len(dataset))
            for tokens, labels in read(dataset[n])
            if len(tokens) == 25
        ]
        assert sorted(ids) == sorted(expected_documents)


def tokens_by(train, samples, key):
    """Count the tokens of documents of the first samples by a function of the document."""
    counts = Counter()
    for ids, labels in chain(*(read(train[n]) for n in range(samples))):
        if set(labels) != {IGNORE_INDEX} or len(ids) == 1:
            counts[key(ids)] += len(ids)
    return counts


def test_a_blend_is_by_tokens_whatever_is_padded(tmp_path):
    """Documents of 30 fill 40 tokens to three quarters, those of 10 whole."""
    few = write_documents(tmp_path / "few", [[1] * 29 + [EOD]] * 20)
    many = write_documents(tmp_path / "many", [[2] * 9 + [EOD]] * 20)
    train = build(("0.5", few, "0.5", many))[0]
    counts = tokens_by(train, 2000, lambda ids: ids[0])
    assert abs(counts[1] / counts[2] - 1) < 1e-3
    padding = 1 - sum(counts.values()) / (2000 * SEQ)
    assert abs(1 - train.fill - padding) < 1e-3


@pytest.mark.parametrize("pack_documents", [True, False])
def test_a_blend_by_length_is_by_tokens(tmp_path, pack_documents):
    lengths = [5] * 90 + [20] * 40 + [70] * 9
    prefix = write_documents(
        tmp_path / "d", [[*[length] * (length - 1), EOD] for length in lengths]
    )
    shares = {
        "blend_by_length": ("5:0.3", "20:0.5"),
        "pack_documents": pack_documents,
        "split": "100,0,0",
    }
    train = build(prefix, **shares)[0]
    counts = Counter(torch.cat([train[n]["tokens"] for n in range(2500)]).tolist())
    kinds = {length: counts[length] * length / (length - 1) for length in (5, 20, 70)}
    for length, share in ((5, 0.2), (20, 0.3), (70, 0.5)):
        assert abs(kinds[length] / sum(kinds.values()) - share) < 4e-3
    again = build(prefix, data_cache_path=str(tmp_path / "other"), **shares)[0]
    assert all(torch.equal(train[n]["tokens"], again[n]["tokens"]) for n in (0, 17, 999))


def test_validation_is_not_by_length_and_weights_are_shared_out_inside_a_file(tmp_path):
    first_prefix = write_documents(tmp_path / "one", [[1] * 5, [2] * 50] * 20)
    two = write_documents(tmp_path / "two", [[3] * 5, [4] * 50] * 20)
    train, valid, _ = build(
        ("0.25", first_prefix, "0.75", two), split="90,10,0", blend_by_length=("5:0.2",)
    )
    counts = tokens_by(train, 2500, lambda ids: ids[0])
    for kind, share in ((1, 0.2), (2, 0.05), (3, 0.6), (4, 0.15)):
        assert abs(counts[kind] / sum(counts.values()) - share) < 2e-3
    alone = build(
        ("0.25", first_prefix, "0.75", two),
        split="90,10,0",
        data_cache_path=str(tmp_path / "other"),
    )[1]
    assert len(valid) == len(alone)
    assert all(torch.equal(valid[n]["tokens"], alone[n]["tokens"]) for n in range(len(valid)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("32768",), "blend_by_length is 32768; it must be TOKENS:SHARE"),
        (("0:0.5",), "ascending numbers of tokens from 1"),
        (("9:0.5", "8:0.2"), "ascending"),
        (("9:nan",), "shares above 0"),
        (("9:0.5", "10:0.5"), "a sum below 1"),
    ],
)
def test_lengths_and_shares_that_are_refused(words, message):
    with pytest.raises(DataError, match=message):
        DataConfig(blend_by_length=words)


def test_lengths_that_a_file_does_not_have_are_refused_by_its_name(prefix):
    with pytest.raises(
        DataError, match=r"d: split .* 0 documents of more than 500 tokens .*give --blend-by-length"
    ):
        build(prefix, blend_by_length=("500:0.5",))

"""Samples from GPTDataset.

Exact tokens, an order that depends on the seed alone, and errors on every rank.
"""

from itertools import chain

import numpy as np
import pytest
import torch

from data.text import indexed
from data.text.blend import BlendedDataset, EpochedDataset
from data.text.config import DataConfig, blend, split_shares
from data.text.megatron import build_datasets, megatron_core
from runtime.errors import DataError
from runtime.ranks import run_ranks
from tests.data.text.corpora import (
    EOD,
    VOCAB_SIZE,
    NumberTokenizer,
    counting_documents,
    write_documents,
)

SEQ = 16
SEED = 1234


@pytest.fixture
def prefix(tmp_path):
    return write_documents(tmp_path / "d", counting_documents(40))


def build(prefix, split="90,10,0", seed=SEED, vocab_size=VOCAB_SIZE, **config):
    settings = DataConfig(data_path=(prefix,), split=split, **config)
    return build_datasets(settings, SEQ, seed, NumberTokenizer(vocab_size))


def tokens_of(dataset, numbers):
    return [dataset[n]["tokens"].tolist() for n in numbers]


def test_order_is_a_function_of_seed_and_number(prefix, tmp_path):
    train = build(prefix)[0]
    length = len(train)
    epochs = [tokens_of(train, range(e * length, (e + 1) * length)) for e in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    again = build(prefix, data_cache_path=str(tmp_path / "other"))[0]
    # Read backwards and without what lies before, as after a resume; epoch 2 comes first.
    assert [again[n]["tokens"].tolist() for n in reversed(range(3 * length))] == list(
        chain(*epochs)
    )[::-1]
    assert (
        tokens_of(build(prefix, seed=SEED + 1)[0], range(length)) == epochs[1]
    )  # epoch e has seed + e


def test_epoch_is_megatrons_own(prefix):
    """The same samples in the same order as Megatron's builder gives for one epoch."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    megatron = megatron_core()
    ours = build(prefix)
    config = megatron.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ,
        blend=([prefix], None),
        split="90,10,0",
        tokenizer=NumberTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    theirs = BlendedMegatronDatasetBuilder(
        megatron.GPTDataset, [None] * 3, lambda: True, config
    ).build()
    assert theirs[2] is None
    assert [len(dataset) for dataset in ours[:2]] == [(36 * 25 - 1) // SEQ, (4 * 25 - 1) // SEQ]
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        assert len(mine) == len(other)
        assert tokens_of(mine, range(len(mine))) == tokens_of(other, range(len(other)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "99,1,0"}, 'split "99,1,0" leaves the valid split 0 documents'),
        ({"split": "0,100,0"}, "nothing to train on"),
        ({"seed": -1}, "seed"),
    ],
)
def test_what_no_samples_are_built_of(prefix, settings, message):
    with pytest.raises(DataError, match=message):
        build(prefix, **settings)


def test_split_is_enough_from_one_sample_on(tmp_path):
    fits = write_documents(tmp_path / "fits", [[1] * (SEQ + 1)])
    train, valid, test = build(fits, "100,0,0")
    assert (len(train), valid, test) == (1, None, None)
    short = write_documents(tmp_path / "short", [[1] * SEQ])
    with pytest.raises(
        DataError,
        match=r"train split 1 documents with 16 tokens in all, but one sample needs .* 17",
    ):
        build(short, "100,0,0")


def test_splits_and_blends_are_parsed():
    assert split_shares("95,5") == [0.95, 0.05, 0.0]
    assert split_shares("2,1,1") == [0.5, 0.25, 0.25]
    assert blend(["a"]) == (["a"], None)
    assert blend(["a", "b"]) == (["a", "b"], None)
    assert blend(["0.3", "a", "7", "b"]) == (["a", "b"], [0.3, 7.0])


BLENDS = (
    ("0.3",),
    ("0.3", "a", "b"),
    ("a", "0.3"),
    ("0", "a"),
    ("-1", "a"),
    ("1", "2"),
    ("a", "b", "3"),
    ("a.bin",),
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({"split": split}, "split is")
            for split in ("", "a", "1,2,3,4", "0,0,0", "-1,2", "inf,1", "nan", "1,,2")
        ),
        *(({"data_path": path}, "data_path") for path in BLENDS),
        ({"num_workers": -1}, "num_workers is -1"),
    ],
)
def test_bad_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields)


@pytest.mark.parametrize("bad", [100, -1])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_bad_id_is_caught_at_the_start_and_at_reading(dtype, bad, tmp_path, monkeypatch):
    """Nor is -1, which GPTDataset masks, masked in silence; without a sign there is none."""
    documents = counting_documents(40, vocab_size=100)
    documents[20][7] = bad
    prefix = write_documents(tmp_path / "d", documents, dtype)
    stored = np.array(bad).astype(dtype)
    with pytest.raises(
        DataError, match=rf"d\.bin holds token id {stored} \(document 20, token 507"
    ):
        build(prefix, vocab_size=100)
    monkeypatch.setattr(
        indexed.check_indexed, "__defaults__", (100,)
    )  # as in a corpus too large to scan
    train = build(prefix, vocab_size=100)[0]
    message = (
        "-1, which is not a token, at 1 positions"
        if stored == -1
        else f"{stored}, but the vocabulary has 100"
    )
    with pytest.raises(DataError, match=rf"d\.bin: sample \d+ holds token id {message}"):
        tokens_of(train, range(len(train)))


def write_two(tmp_path):
    """Two files whose ids tell them apart: a below 500, b from 500."""
    low = write_documents(tmp_path / "a", counting_documents(40, vocab_size=500))
    high = [
        [token + 500 if token else EOD for token in document]
        for document in counting_documents(20, vocab_size=499)
    ]
    return low, write_documents(tmp_path / "b", high)


def test_blend_follows_weights_whatever_is_read(tmp_path):
    low, high = write_two(tmp_path)
    blended = DataConfig(data_path=("0.2", low, "0.8", high), split="100,0,0")
    train = build_datasets(blended, SEQ, SEED, NumberTokenizer())[0]
    assert isinstance(train, BlendedDataset)
    owners = [int(train[n]["tokens"].max() >= 500) for n in range(500)]
    for end in range(5, 500):
        assert abs(sum(owners[:end]) - 0.8 * end) <= 1.5
    # Each file's samples come in its own order, epochs included.
    alone = build(high, "100,0,0")[0]
    mine = [n for n, owner in enumerate(owners) if owner]
    assert [train[n]["tokens"].tolist() for n in mine] == tokens_of(alone, range(len(mine)))
    assert len(mine) > 2 * len(alone)


def test_blend_without_weights_goes_by_size(tmp_path):
    config = DataConfig(data_path=write_two(tmp_path), split="100,0,0")
    train = build_datasets(config, SEQ, SEED, NumberTokenizer())[0]
    total = (40 * 25 - 1) // SEQ + (20 * 25 - 1) // SEQ
    assert total - 2 <= len(train) <= total
    samples = tokens_of(train, range(len(train)))
    assert len({tuple(sample) for sample in samples}) == len(samples)  # nothing repeats before len


class Numbered:
    fill = 1.0

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


def test_blend_locates_every_sample_once():
    weights = [1e-9, 3.0, 5.0, 0.001]
    blended = BlendedDataset([Numbered(70_000)] * 4, weights)
    numbers_by_file = [[], [], [], []]
    for n in range(200_000):
        owner, number = blended.locate(n)
        numbers_by_file[owner].append(number)
    assert all(numbers == list(range(len(numbers))) and numbers for numbers in numbers_by_file)
    assert len(numbers_by_file[2]) / len(numbers_by_file[1]) == pytest.approx(5 / 3, rel=1e-3)
    first_repeat = next(n for n in range(1 << 20) if blended.locate(n)[1] >= 70_000)
    assert len(blended) == first_repeat


def test_epochs_are_built_once_and_let_go():
    built = []

    class Constant:
        def __init__(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 4

        def __getitem__(self, index):
            ids = torch.full((2,), self.epoch)
            return {"tokens": ids, "labels": ids, "loss_mask": torch.ones(2)}

    def make(epoch):
        built.append(epoch)
        return Constant(epoch)

    dataset = EpochedDataset(Constant(0), make, name="x", vocab_size=100)
    assert [int(dataset[n]["tokens"][0]) for n in range(40)] == [n // 4 for n in range(40)]
    assert built == list(range(1, 10))
    assert len(dataset._epochs) == 3


def error_of(path):
    try:
        build(path)
    except DataError as error:
        return str(error)
    return "no error"


def rank_samples(rank, world_size, settings, bad=None, good=None):
    samples = []
    for of_run in settings:
        config = DataConfig(split="90,10,0", **of_run)
        train, valid, _ = build_datasets(config, SEQ, SEED, NumberTokenizer())
        samples.append(
            (tokens_of(train, range(2 * len(train))), tokens_of(valid, range(len(valid))))
        )
    failing = ((0, 1), (0,), (1,)) if bad else ()
    return samples, [error_of(bad if rank in ranks else good) for ranks in failing]


def test_ranks_agree_with_one_process_and_fail_together(tmp_path, prefix):
    """A bad file raises on every rank, whichever ranks have it."""
    low, high = write_two(tmp_path)
    packed = {
        "data_path": (write_documents(tmp_path / "p", counting_documents(40)),),
        "pack_documents": True,
    }
    settings = [{"data_path": (prefix,)}, {"data_path": ("0.3", low, "0.7", high)}, packed]
    bad = write_documents(tmp_path / "bad", counting_documents(40))
    with open(f"{bad}.bin", "r+b") as stream:
        stream.truncate(100)
    (samples, errors), others = run_ranks(rank_samples, 2, settings, bad, prefix)
    assert (samples, errors) == others
    assert ["bad.bin has 100 bytes" in error for error in errors] == [True] * 3
    assert [len(list((tmp_path / name / "cache").iterdir())) for name in "dp"] == [1, 1]
    assert samples == rank_samples(0, 1, settings)[0]


def test_ids_that_the_tokenizer_has_and_the_model_lacks_are_refused_by_name(tmp_path):
    documents = counting_documents(40)
    highest = max(max(document) for document in documents)
    prefix = write_documents(tmp_path / "d", documents)
    config, tokenizer = DataConfig(data_path=(prefix,), split="90,10,0"), NumberTokenizer()
    build_datasets(config, SEQ, SEED, tokenizer, highest + 1)
    message = (
        rf"document 39, token \d+ of the file: token {highest} "
        rf"\('{highest}'\) is in the tokenizer's {VOCAB_SIZE}"
    )
    with pytest.raises(DataError, match=message):
        build_datasets(config, SEQ, SEED, tokenizer, highest)


def test_an_end_token_that_the_model_lacks_is_refused_before_any_data_is_read(tmp_path):
    tokenizer = NumberTokenizer(eod=VOCAB_SIZE - 1)
    with pytest.raises(
        DataError,
        match=r"tokenizer_model numbers ends documents with a token that the model lacks: token",
    ):
        build_datasets(
            DataConfig(data_path=(str(tmp_path / "none"),)), SEQ, SEED, tokenizer, VOCAB_SIZE - 1
        )

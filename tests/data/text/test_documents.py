"""Documents in samples are those of the `.idx`, however they end.

A twin walks the stream by hand.
"""

import random
from collections import Counter
from itertools import chain, pairwise, product

import numpy as np
import pytest
import torch

from data.loader import IGNORE_INDEX
from data.text.blend import positions_in_documents
from data.text.config import DataConfig
from data.text.indexed import check_indexed
from data.text.megatron import build_datasets, megatron_core
from planner.workload import _lengths
from runtime.errors import DataError
from tests.data.text.corpora import EOD, NumberTokenizer, document_starts, write_pair

SEQ = 32


def draw(seed, count=60, longest=23):
    """Draw texts of ids that are no end."""
    random_state = random.Random(seed)
    return [
        [random_state.randint(1, 999) for _ in range(random_state.randint(1, longest))]
        for _ in range(count)
    ]


def in_sentences(text):
    third = len(text) // 3
    return [text[:third], text[third : 2 * third], text[2 * third :]]


KINDS = {
    "ends": [[[*text, EOD]] for text in draw(1)],
    "no ends": [[text] for text in draw(2)],
    "no ends, but the end token at the beginning": [[[EOD, *text]] for text in draw(3)],
    "the end token at the beginning and at the end": [[[EOD, *text, EOD]] for text in draw(4)],
    "sentences": [in_sentences(text) for text in draw(5)],
    "sentences and ends": [in_sentences([*text, EOD]) for text in draw(6)],
    "sentences, but none in some documents": [
        in_sentences(text) if text[0] % 3 else [] for text in draw(7)
    ],
    "empty sequences": [[text if text[0] % 3 else []] for text in draw(8)],
    "several texts with ends in a document": [
        [[*text, EOD, *text[::-1], EOD, *text]] for text in draw(9, longest=9)
    ],
    "texts without tokens": [[[EOD]] if text[0] % 3 else [[EOD, EOD, *text]] for text in draw(10)],
    "long documents": [[text * 7] for text in draw(11, count=20)],
}


def numbered(documents):
    """Return (token, number of its text) of every token, by document: the rule by hand."""
    text = 0
    result = []
    for sequences in documents:
        ids = [*chain(*sequences)]
        tokens = []
        for place, token in enumerate(ids):
            tokens.append((token, text))
            begins_all = place == 0 and len(ids) > 1
            text += token == EOD and not begins_all
        result.append(tokens)
        text += 1
    return result


def build(*prefixes, **flags):
    settings = DataConfig(data_path=prefixes, split="100,0,0", **flags)
    return build_datasets(settings, SEQ, 1234, NumberTokenizer())[0]


def streamed(documents, epoch):
    """Return the samples of an epoch of a stream, each S + 1 (token, text)."""
    stream = [*chain(*(documents[number] for number in epoch.document_index))]
    return [stream[SEQ * place : SEQ * place + SEQ + 1] for place in epoch.shuffle_index.tolist()]


@pytest.mark.parametrize(("kind", "mask"), [*((kind, True) for kind in KINDS), ("no ends", False)])
def test_segments_and_losses_of_a_stream_are_those_of_the_index(tmp_path, kind, mask):
    prefix = write_pair(tmp_path / "d", KINDS[kind])
    train = build(prefix, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=mask)
    documents = numbered(KINDS[kind])
    for epoch in range(2):
        samples = streamed(documents, train._epoch(epoch)._dataset)
        assert len(samples) == len(train) > 5
        for number, twin in enumerate(samples):
            sample = train[epoch * len(train) + number]
            tokens, texts = zip(*twin, strict=True)
            assert sample["tokens"].tolist() == list(tokens[:-1])
            assert sample["labels"].tolist() == list(tokens[1:])
            assert sample["starts"].tolist() == [True, *(a != b for a, b in pairwise(texts[:-1]))]
            assert sample["loss_mask"].tolist() == [
                float(not mask or a == b) for a, b in pairwise(texts)
            ]
    assert torch.equal(train[None]["starts"], train[0]["starts"])
    assert not train[None]["loss_mask"].any()


def test_a_flag_alone_does_its_part(tmp_path):
    prefix = write_pair(tmp_path / "d", KINDS["no ends"])
    both = build(prefix, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True)
    masked = build(prefix, eod_mask_loss=True)
    plain = build(prefix)
    alone = [
        build(prefix, **{flag: True}) for flag in ("reset_attention_mask", "reset_position_ids")
    ]
    for number in range(len(both)):
        assert masked[number].keys() == plain[number].keys() == {"tokens", "labels", "loss_mask"}
        assert torch.equal(masked[number]["loss_mask"], both[number]["loss_mask"])
        assert plain[number]["loss_mask"].all()
        for sample in (dataset[number] for dataset in alone):
            assert torch.equal(sample["starts"], both[number]["starts"])
            assert sample["loss_mask"].all()


def test_documents_that_all_end_are_megatrons_to_the_bit(tmp_path):
    """Tokens, positions, and the losses that Megatron's own flags leave.

    No old run's numbers change.
    """
    prefix = write_pair(tmp_path / "d", KINDS["ends"])
    train = build(prefix, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True)
    config = megatron_core().GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQ,
        blend=([prefix], None),
        split="100,0,0",
        tokenizer=NumberTokenizer(),
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        create_attention_mask=True,
    )
    every = np.arange(60, dtype=np.int32)
    low_level = megatron_core().IndexedDataset(prefix)
    train_split = megatron_core().Split.train
    theirs = megatron_core().GPTDataset(low_level, prefix, every, None, train_split, config)
    assert len(train) == len(theirs)
    for number in range(len(train)):
        sample, other = train[number], theirs[number]
        assert torch.equal(sample["tokens"], other["tokens"])
        assert torch.equal(sample["loss_mask"], other["loss_mask"])
        assert torch.equal(positions_in_documents(sample["starts"]), other["position_ids"])
        segments = sample["starts"].cumsum(0)
        assert torch.equal((segments[:, None] == segments).tril(), ~other["attention_mask"][0])


def test_the_end_tokens_alone_would_mix_every_segment_and_learn_every_boundary(tmp_path):
    """The fault, and the control of the tests above.

    Of documents without ends, Megatron's rule finds none.
    """
    documents = numbered(KINDS["no ends"])
    train = build(
        write_pair(tmp_path / "d", KINDS["no ends"]), reset_attention_mask=True, eod_mask_loss=True
    )
    mixed = Counter()
    learned = Counter()
    for number, twin in enumerate(streamed(documents, train._epoch(0)._dataset)):
        texts = [text for _, text in twin]
        ours = train[number]["starts"]
        theirs = document_starts(train[number]["tokens"], EOD)
        for name, starts in (("ours", ours), ("theirs", theirs)):
            bounds = [*starts.nonzero().flatten().tolist(), SEQ]
            mixed[name] += sum(len(set(texts[a:b])) > 1 for a, b in pairwise(bounds))
        boundaries = [place for place, (a, b) in enumerate(pairwise(texts)) if a != b]
        learned["ours"] += sum(bool(train[number]["loss_mask"][place]) for place in boundaries)
        learned["theirs"] += sum(twin[place][0] != EOD for place in boundaries)
    assert (mixed["ours"], learned["ours"]) == (0, 0)
    assert mixed["theirs"] == len(train)
    assert learned["theirs"] > len(train)


def packed(sample):
    """Return (tokens, labels with loss) of each segment."""
    bounds = [*sample["starts"].nonzero().flatten().tolist(), SEQ]
    labels = sample["labels"].where(sample["loss_mask"] > 0, IGNORE_INDEX)
    return [
        (tuple(sample["tokens"][a:b].tolist()), tuple(labels[a:b].tolist()))
        for a, b in pairwise(bounds)
    ]


def fragments_of(documents):
    """Return what `packed` has of all documents.

    They are texts, cut where a document of the .idx is longer than S.
    """
    for tokens in documents:
        for begin in range(0, len(tokens), SEQ):
            part = tokens[begin : begin + SEQ + 1]
            following = [*part[1:], (None, None)][: min(len(part), SEQ)]
            labels = [
                b if text == other else IGNORE_INDEX
                for (_, text), (b, other) in zip(part, following, strict=False)
            ]
            for text in dict.fromkeys(text for _, text in part[:SEQ]):
                indices = [place for place, (_, other) in enumerate(part[:SEQ]) if other == text]
                yield (
                    tuple(part[place][0] for place in indices),
                    tuple(labels[place] for place in indices),
                )


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_those_of_the_index(tmp_path, kind):
    train = build(
        write_pair(tmp_path / "d", KINDS[kind]), pack_documents=True, reset_attention_mask=True
    )
    segments = Counter(chain(*(packed(train[number]) for number in range(len(train)))))
    expected = Counter(fragments_of(numbered(KINDS[kind])))
    for counts in (segments, expected):
        for segment in [segment for segment in counts if set(segment[0]) == {EOD}]:
            del counts[segment]  # like padding
    assert segments == expected


def test_a_blend_has_the_documents_of_each_of_its_files(tmp_path):
    names = ("ends", "no ends", "the end token at the beginning and at the end", "sentences")
    prefixes = [
        write_pair(tmp_path / str(number), KINDS[name]) for number, name in enumerate(names)
    ]
    flags = {"reset_attention_mask": True, "eod_mask_loss": True}
    train = build(*chain(*zip("1234", prefixes, strict=True)), **flags)
    alone = [build(prefix, **flags) for prefix in prefixes]
    counts = Counter()
    for number in range(200):
        owner, own_number = train.locate(number)
        counts[owner] += 1
        assert all(
            torch.equal(value, alone[owner][own_number][name])
            for name, value in train[number].items()
        )
    assert len(counts) == 4


def test_sentences_of_a_document_are_shuffled_split_and_counted_as_one(tmp_path):
    prefix = write_pair(tmp_path / "d", KINDS["sentences"])
    whole = write_pair(
        tmp_path / "whole", [[[*chain(*sequences)]] for sequences in KINDS["sentences"]]
    )
    flags = {"reset_attention_mask": True, "split": "90,10,0"}
    for packing in (False, True):
        datasets = []
        for name in (prefix, whole):
            settings = DataConfig(data_path=(name,), pack_documents=packing, **flags)
            datasets.append(build_datasets(settings, SEQ, 1, NumberTokenizer())[:2])
        for sentences, documents in zip(*datasets, strict=True):
            assert len(sentences) == len(documents)
            for number in range(2 * len(documents)):
                assert all(
                    torch.equal(sentences[number][name], x) for name, x in documents[number].items()
                )
    assert (
        check_indexed(prefix, 1000).document_lengths.tolist()
        == check_indexed(whole, 1000).lengths.tolist()
    )
    assert _lengths((prefix,), ()).tolist() == _lengths((whole,), ()).tolist()


def test_sequences_of_one_document_alone_are_documents_and_that_is_told(tmp_path, capsys):
    """As tools write that know of no documents: one could neither be shuffled nor split."""
    prefix = write_pair(tmp_path / "lumped", [[*chain(*KINDS["no ends"])]])
    whole = write_pair(tmp_path / "whole", KINDS["no ends"])
    train = build(prefix, reset_attention_mask=True)
    assert "note:" in (message := capsys.readouterr().err)
    assert "lumped.idx has one document of 60 sequences" in message
    other = build(whole, reset_attention_mask=True)
    assert capsys.readouterr().err == ""
    assert all(
        torch.equal(train[n][name], other[n][name])
        for n, name in product(range(9), ("tokens", "starts"))
    )


def test_document_bounds_of_a_damaged_index_are_refused_where_lengths_are_read(tmp_path):
    prefix = write_pair(tmp_path / "d", KINDS["sentences"])
    content = bytearray((tmp_path / "d.idx").read_bytes())
    content[-8:] = (999).to_bytes(8, "little")
    (tmp_path / "d.idx").write_bytes(content)
    with pytest.raises(DataError, match=r"d\.idx has document bounds"):
        _lengths((prefix,), ())

"""Documents' starts in samples, and positions that restart there: Megatron's own."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from data.text.blend import cumulative_lengths, document_starts, positions_in_documents
from data.text.config import DataConfig
from data.text.megatron import build_datasets, megatron_core
from tests.data.text.corpora import EOD, NumberTokenizer, counting_documents, write_documents

SEQ = 64


def megatrons(tokens):
    """The positions of Megatron, and which keys [S, S] its mask lets each token see."""
    megatron_core()
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    hidden, _, positions = _get_ltor_masks_and_position_ids(tokens, EOD, True, True, False, True)
    return positions, ~hidden[0]


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 1.0])
def test_documents_are_those_of_megatron(share):
    """From no document's end to one at every token."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        ends = torch.rand(SEQ, generator=generator) < share
        tokens = torch.randint(1, 9, (SEQ,), generator=generator).masked_fill(ends, EOD)
        starts = document_starts(tokens, EOD)
        positions, seen = megatrons(tokens)
        assert torch.equal(positions_in_documents(starts), positions)
        documents = starts.cumsum(0)
        assert torch.equal((documents[:, None] == documents).tril(), seen)
        bounds = cumulative_lengths(starts)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, SEQ, int(documents[-1]) + 1)
        assert all(seen[end - 1, start:end].all() for start, end in pairwise(bounds))


def test_an_end_belongs_to_the_document_before_it_and_rows_are_apart():
    tokens = torch.tensor([[5, EOD, 6, 7, EOD], [EOD, EOD, 8, 9, 9]])
    starts = document_starts(tokens, EOD)
    assert starts.dtype == torch.bool
    assert starts.int().tolist() == [[1, 0, 1, 0, 0], [1, 1, 1, 0, 0]]
    assert positions_in_documents(starts).tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2]]
    assert cumulative_lengths(starts.flatten()) == (0, 2, 5, 6, 7, 10)


@pytest.mark.parametrize("flag", ["reset_position_ids", "reset_attention_mask"])
def test_samples_of_a_file_tell_where_its_documents_begin(tmp_path, flag):
    """Documents of 25 tokens, samples of 64 that begin anywhere in them; a filler tells it too."""
    prefix = write_documents(tmp_path / "d", counting_documents(40))
    plain = DataConfig(data_path=(prefix,), split="100,0,0")
    config = replace(plain, **{flag: True})
    train = build_datasets(config, SEQ, 1, NumberTokenizer())[0]
    inside = 0
    for number in [*range(len(train)), None]:
        sample = train[number]
        begins = [0] + [place + 1 for place in (sample["tokens"][:-1] == EOD).nonzero().flatten().tolist()]
        assert sample["starts"].nonzero().flatten().tolist() == begins
        assert len(begins) in (3, 4)
        inside += int(sample["tokens"][0] % 24 != 1)
    assert inside > len(train) / 2, "samples begin inside of documents"
    assert (sample["loss_mask"] == 0).all()
    without = build_datasets(plain, SEQ, 1, NumberTokenizer())[0][3]
    assert without.keys() == {"tokens", "labels", "loss_mask"}
    assert all(torch.equal(without[name], train[3][name]) for name in without)

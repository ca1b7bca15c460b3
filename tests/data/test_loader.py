"""Batches in the global order, from any number of consumed samples.

It is the same whatever the ranks, micro-batches and readers.
"""

import pytest
import torch

from data.loader import IGNORE_INDEX, Batching, batches, evaluation_batches
from data.text.config import DataConfig
from data.text.megatron import build_datasets
from runtime.errors import DataError
from tests.data.text.corpora import EOD, NumberTokenizer, counting_documents, write_documents

SEQ = 8
GLOBAL = 24


class Numbers:
    """Sample n is filled with n; endless, of `length` samples per epoch."""

    def __init__(self, length=20, bad=None):
        self.length, self.bad = length, bad

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index is not None and index == self.bad:
            raise DataError(f"x.bin: sample {index} is bad")
        ids = torch.full((SEQ,), 0 if index is None else index)
        mask = torch.ones(SEQ) if index is not None else torch.zeros(SEQ)
        return {"tokens": ids, "labels": ids + 1, "loss_mask": mask}


def steps(count, consumed_samples, **batching):
    """First tokens of each micro-batch of `count` steps."""
    loader = batches(Numbers(), Batching(global_batch_size=GLOBAL, **batching), consumed_samples)
    return [[batch["tokens"][:, 0].tolist() for batch in next(loader)] for _ in range(count)]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("consumed", [0, 24, 7, 1_000_003])
def test_ranks_share_the_global_order(dp_size, micro_batch_size, consumed):
    ranks = [
        steps(
            3,
            consumed_samples=consumed,
            micro_batch_size=micro_batch_size,
            dp_rank=rank,
            dp_size=dp_size,
        )
        for rank in range(dp_size)
    ]
    for step in range(3):
        begin = consumed + step * GLOBAL
        per_rank = [rank[step] for rank in ranks]
        assert all(len(mine) == GLOBAL // (dp_size * micro_batch_size) for mine in per_rank)
        assert all(
            len(micro_batch) == micro_batch_size for mine in per_rank for micro_batch in mine
        )
        together = [
            number
            for turn in zip(*per_rank, strict=True)
            for micro_batch in turn
            for number in micro_batch
        ]
        assert together == list(range(begin, begin + GLOBAL))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_continues_the_order(num_workers):
    arguments = {"micro_batch_size": 2, "dp_rank": 1, "dp_size": 2, "num_workers": num_workers}
    whole = steps(6, consumed_samples=0, **arguments)
    assert steps(3, consumed_samples=3 * GLOBAL, **arguments) == whole[3:]


def test_reading_leaves_the_random_state_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    steps(2, consumed_samples=0, micro_batch_size=2, num_workers=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("global_batch", "micro", "dp"), [(12, 5, 1), (12, 2, 4), (0, 1, 1), (12, 0, 1)]
)
def test_sizes_that_do_not_divide(global_batch, micro, dp):
    with pytest.raises(
        DataError, match=f"global_batch_size {global_batch} .*micro_batch_size {micro} .* size {dp}"
    ):
        Batching(global_batch_size=global_batch, micro_batch_size=micro, dp_size=dp)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_sample_raises_one_clear_message(num_workers):
    batching = Batching(global_batch_size=GLOBAL, micro_batch_size=3, num_workers=num_workers)
    loader = batches(Numbers(bad=29), batching, 0)
    next(loader)
    with pytest.raises(DataError) as raised:
        next(loader)
    assert str(raised.value) == "x.bin: sample 29 is bad"


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("num_samples", [1, 8, 11, 20, 50])
def test_evaluation_reads_each_sample_once(dp_size, num_samples):
    sizes = {"global_batch_size": 8, "micro_batch_size": 2, "dp_size": dp_size}
    ranks = [
        list(evaluation_batches(Numbers(), Batching(dp_rank=rank, **sizes), num_samples))
        for rank in range(dp_size)
    ]
    # All ranks make the same calls, or their collectives would wait for each other.
    assert len({tuple(len(step) for step in rank) for rank in ranks}) == 1
    read = [batch for rank in ranks for step in rank for batch in step]
    rows = [row for batch in read for row in zip(batch["tokens"], batch["labels"], strict=True)]
    counted = sorted(int(tokens[0]) for tokens, labels in rows if (labels != IGNORE_INDEX).all())
    fillers = [labels for _, labels in rows if (labels == IGNORE_INDEX).all()]
    assert counted == list(range(min(num_samples, 20)))  # it never wraps
    assert len(counted) + len(fillers) == len(rows) == -(-len(counted) // 8) * 8


@pytest.mark.parametrize(("num_workers", "eod_mask_loss"), [(0, True), (2, False)])
def test_real_files_over_an_epochs_boundary(tmp_path, num_workers, eod_mask_loss):
    prefix = write_documents(tmp_path / "d", counting_documents(10))
    config = DataConfig(data_path=(prefix,), split="100,0,0", eod_mask_loss=eod_mask_loss)
    train = build_datasets(config, SEQ, 1, NumberTokenizer())[0]
    batching = Batching(global_batch_size=8, micro_batch_size=4, num_workers=num_workers)
    loader = batches(train, batching, len(train) - 5)
    got = [batch for _ in range(10) for batch in next(loader)]
    expected = [train[n] for n in range(len(train) - 5, len(train) + 75)]
    assert 2 * len(train) < 75
    tokens = torch.cat([batch["tokens"] for batch in got])
    labels = torch.cat([batch["labels"] for batch in got])
    assert tokens.dtype == labels.dtype == torch.int64
    assert torch.equal(tokens, torch.stack([sample["tokens"] for sample in expected]))
    ignored = labels == IGNORE_INDEX
    assert torch.equal(ignored, (tokens == EOD) if eod_mask_loss else torch.zeros_like(ignored))
    assert torch.equal(
        labels[~ignored], torch.stack([sample["labels"] for sample in expected])[~ignored]
    )


def test_filler_of_a_real_file_carries_no_loss(tmp_path):
    prefix = write_documents(tmp_path / "d", counting_documents(10))
    valid = build_datasets(
        DataConfig(data_path=(prefix,), split="50,50"), SEQ, 1, NumberTokenizer()
    )[1]
    (step,) = evaluation_batches(valid, Batching(global_batch_size=4, micro_batch_size=4), 3)
    labels = step[0]["labels"]
    assert (labels[:3] != IGNORE_INDEX).all()
    assert (labels[3] == IGNORE_INDEX).all()
    # The mask of a filler must not stick to the samples read after it.
    assert (valid[0]["loss_mask"] == 1).all()


class Pictures(Numbers):
    def __getitem__(self, index):
        return {
            "latents": torch.full((2, 3), float(index or 0)),
            "sample": torch.tensor(-1 if index is None else index),
        }


def test_samples_without_a_loss_mask_come_as_they_are():
    batching = Batching(global_batch_size=4, micro_batch_size=2, dp_rank=1, dp_size=2)
    (batch,) = next(batches(Pictures(), batching, 4))
    assert batch["sample"].tolist() == [6, 7]
    assert batch["latents"].shape == (2, 2, 3)
    last = list(evaluation_batches(Pictures(length=5), batching, 8))[-1]
    assert last[0]["sample"].tolist() == [-1, -1]

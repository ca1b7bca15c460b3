"""Batches packed and cut, over one process: rows, padding, documents, labels.

What is refused names the fix.
"""

import pytest
import torch

from parallel.context import context_parallel
from parallel.transformers.batch import IGNORED, pack, shard_batch
from runtime.errors import UserError

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
POSITIONS = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])


def packed(ids=IDS, labels=IDS, position_ids=None, documents=None, attention_mask=None):
    whole = pack(ids, labels, position_ids, documents, attention_mask)
    return {name: x[0].tolist() for name, x in whole.tokens.items()} | {"bounds": whole.cu_seqlens}


def test_rows_are_documents_and_labels_are_shifted_within_them():
    assert packed() == {
        "input_ids": [5, 6, 7, 8, 9, 10, 11, 12],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 3],
        "labels": [6, 7, 8, IGNORED, 10, 11, 12, IGNORED],
        "bounds": (0, 4, 8),
    }


def test_documents_come_from_position_ids_or_lengths():
    by_positions, by_lengths = packed(position_ids=POSITIONS), packed(documents=(2, 2, 4))
    assert by_positions == by_lengths
    assert by_lengths["bounds"] == (0, 2, 4, 8)
    assert by_lengths["position_ids"] == [0, 1, 0, 1, 0, 1, 2, 3]
    assert by_lengths["labels"] == [6, IGNORED, 8, IGNORED, 10, 11, 12, IGNORED]
    assert by_lengths == packed(documents=torch.tensor([2, 2, 4]))
    later = packed(position_ids=POSITIONS + 3)  # such as of the later half of a document
    assert later["bounds"] == (0, 2, 4, 8)
    assert later["position_ids"] == [3, 4, 3, 4, 3, 4, 5, 6]


@pytest.mark.parametrize("left", [True, False])
def test_padding_is_left_out(left):
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    inputs = packed(attention_mask=mask if left else mask.flip(1))
    assert inputs["input_ids"] == ([7, 8] if left else [5, 6]) + [9, 10, 11, 12]
    assert inputs["position_ids"] == [0, 1, 0, 1, 2, 3]
    assert inputs["bounds"] == (0, 2, 6)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16])
def test_a_mask_of_any_dtype_leaves_out_a_row_of_padding_alone(dtype):
    inputs = packed(attention_mask=torch.tensor([[0, 0, 0, 0], [1, 1, 1, 0]]).to(dtype))
    assert inputs == {
        "input_ids": [9, 10, 11],
        "position_ids": [0, 1, 2],
        "labels": [10, 11, IGNORED],
        "bounds": (0, 3),
    }


def test_ranks_have_the_labels_of_the_whole():
    whole = pack(IDS, IDS.masked_fill(IDS == 10, IGNORED), None, None, None)
    batch = shard_batch(
        whole, context_parallel("zigzag", seq_len=8, documents=whole.cu_seqlens, multiple=6)
    )
    assert batch.inputs["input_ids"].shape == (1, 12)  # padded at the end
    assert batch.labels[0].tolist() == [6, 7, 8, IGNORED, IGNORED, 11, 12, *[IGNORED] * 5]
    assert batch.inputs["use_cache"] is False


def test_a_batch_without_labels_has_none():
    assert set(packed(labels=None)["labels"]) == {IGNORED}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"documents": (2, 5)},
            r"documents is \(2, 5\); give the length of each document, 1 or more, with a sum of 8",
        ),
        ({"documents": (0, 4, 8)}, "give the length of each"),
        ({"documents": (0, 8)}, "give the length of each"),
        ({"documents": (3, 5)}, "has no document that ends with row 0, after 4 tokens"),
        (
            {"labels": IDS[:1]},
            r"input_ids has shape \(2, 4\), but labels has shape \(1, 4\); give both as \[B, T\]",
        ),
        ({"position_ids": POSITIONS.expand(3, 2, 4)}, r"position_ids has shape \(3, 2, 4\)"),
        ({"ids": IDS[0], "labels": IDS[0]}, r"input_ids has shape \(4,\)"),
        ({"attention_mask": torch.zeros(2, 4)}, "attention_mask leaves no token"),
        (
            {"attention_mask": torch.tensor([[1, 1, 2, 2], [1, 1, 1, 0]])},
            "attention_mask contains 2, ",
        ),
        (
            {"attention_mask": torch.tensor([[0.0, 0, 0, -torch.inf]] * 2)},
            "attention_mask contains -inf, ",
        ),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, r"attention_mask has shape \(2, 1, 4, 4\)"),
    ],
)
def test_a_wrong_batch_is_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        packed(**wrong)

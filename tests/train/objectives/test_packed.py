"""Documents in the next-token objective: joined samples, restarted positions, and a plan that lives with its batch."""

import gc
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from data.loader import IGNORE_INDEX
from data.text.blend import document_starts, positions_in_documents
from kernels.loss import cross_entropy_sum
from model.config import ModelConfig
from model.registry import build_model
from parallel.context import context_parallel, plan
from parallel.context.plan import PLANS
from train.objectives.language import NextToken

ROWS, LENGTH, EOD = 2, 13, 0
LLAMA = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=29, init_method_std=0.2)
CPU = torch.device("cpu")


def packed_batch():
    """Ends at 3 and 7 of the first row, at 0 and 12 of the second."""
    tokens = torch.randint(1, 29, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    for place in ((0, 3), (0, 7), (1, 0), (1, 12)):
        tokens[place] = EOD
    labels = tokens[:, 1:].clone()
    labels[1, 4:6] = IGNORE_INDEX
    return {"tokens": tokens[:, :-1], "labels": labels, "starts": document_starts(tokens[:, :-1], EOD)}


def objective(*flags, multiple=1):
    joined = ROWS if "reset_attention_mask" in flags else 1
    cp = context_parallel("ring", seq_len=joined * LENGTH, multiple=multiple)
    return NextToken(cp, CPU, **dict.fromkeys(flags, True))


def model():
    found = build_model(LLAMA, context_parallel("ring", seq_len=ROWS * LENGTH).attend)
    found.init_weights(3)
    return found


def test_without_a_flag_a_batch_is_as_it_was():
    batch = packed_batch()
    local = objective().local(batch)
    assert local.keys() == {"tokens", "labels", "count"}
    assert all(torch.equal(local[name], batch[name]) for name in ("tokens", "labels"))
    assert int(local["count"]) == ROWS * LENGTH - 2


def test_samples_are_joined_into_one_sequence_and_padding_carries_nothing():
    batch, one = packed_batch(), objective("reset_attention_mask", "reset_position_ids", multiple=4)
    local = one.local(batch)
    assert {name: tuple(value.shape) for name, value in local.items()} == {
        **dict.fromkeys(("tokens", "labels", "positions"), (1, 28)),
        "plan": (1,),
        "count": (1,),
    }
    for name in ("tokens", "labels"):
        assert torch.equal(local[name][0, : ROWS * LENGTH], batch[name].flatten())
    assert torch.equal(local["positions"][0, : ROWS * LENGTH], positions_in_documents(batch["starts"]).flatten())
    assert local["positions"][0, ROWS * LENGTH :].tolist() == [0, 0]
    assert local["labels"][0, ROWS * LENGTH :].tolist() == [IGNORE_INDEX] * 2
    assert PLANS[local["plan"]].documents == (0, 4, 8, 13, 14, 26)
    assert one.lengths(local) == [4, 4, 5, 1, 12], "FLOPs count attention inside documents"
    assert objective().lengths(objective().local(batch)) == [LENGTH] * ROWS
    name, like = one.first_input(ROWS)
    assert (name, like.shape) == ("tokens", (1, 28))
    assert int(local["count"]) == int((batch["labels"] != IGNORE_INDEX).sum()) == ROWS * LENGTH - 2


def test_positions_restart_alone_or_attention_is_apart_alone():
    """Each flag for itself, as in Megatron: samples as they are with positions of documents, or the reverse."""
    batch = packed_batch()
    restarted, apart = objective("reset_position_ids").local(batch), objective("reset_attention_mask").local(batch)
    assert restarted.keys() == {"tokens", "labels", "positions", "count"}
    assert torch.equal(restarted["positions"], positions_in_documents(batch["starts"]))
    assert torch.equal(apart["positions"][0], torch.arange(LENGTH).repeat(ROWS))
    plain = build_model(LLAMA)
    plain.init_weights(3)
    want = cross_entropy_sum(plain(batch["tokens"], restarted["positions"]), batch["labels"])[0]
    got = objective("reset_position_ids").loss_sum(plain, restarted)
    torch.testing.assert_close(got, want)
    assert abs(got - cross_entropy_sum(plain(batch["tokens"]), batch["labels"])[0]) > 1e-3


@pytest.mark.parametrize("restart", [True, False])
def test_the_loss_is_that_of_the_documents_alone(restart):
    """Rotary positions need not restart: only their differences count."""
    batch, flags = packed_batch(), ("reset_attention_mask", *(["reset_position_ids"] * restart))
    one, plain = objective(*flags), build_model(LLAMA)
    plain.init_weights(3)
    local = one.local(batch)
    bounds = (0, 4, 8, 13, 14, 26)
    tokens, labels = batch["tokens"].flatten(), batch["labels"].flatten()
    want = sum(
        cross_entropy_sum(plain(tokens[None, begin:end]), labels[None, begin:end])[0] for begin, end in pairwise(bounds)
    )
    torch.testing.assert_close(one.loss_sum(model(), local), want)


def test_the_plan_of_a_micro_batch_lives_as_long_as_its_batch():
    """A pipeline joins a step's micro-batches and takes them apart: the parts do not keep the plans, the batches do."""
    one = objective("reset_attention_mask")
    batches = [one.local(packed_batch()), one.local(replaced(packed_batch()))]
    parts = torch.cat([batch["plan"] for batch in batches]).chunk(2)
    plan._packed.cache_clear()
    gc.collect()
    assert [len(PLANS[part].documents or ()) for part in parts] == [6, 5]
    numbers = [int(part) for part in parts]
    del batches
    gc.collect()
    for number in numbers:
        with pytest.raises(KeyError):
            PLANS[number]


def replaced(batch):
    starts = batch["starts"].clone()
    starts[0, 4] = False
    return batch | {"starts": starts}


def test_learned_positions_restart_in_a_table_as_long_as_a_sample():
    """Joined samples are longer than the table; their positions are not."""
    config = replace(LLAMA, model_type="gpt", max_position_embeddings=LENGTH)
    gpt = build_model(config, context_parallel("ring", seq_len=ROWS * LENGTH).attend)
    gpt.init_weights(3)
    one = objective("reset_attention_mask", "reset_position_ids")
    assert torch.isfinite(one.loss_sum(gpt, one.local(packed_batch())))

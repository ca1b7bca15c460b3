"""Next-token prediction over context-parallel ranks.

Every token once, padding never, documents apart.
"""

import gc
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data.loader import IGNORE_INDEX
from data.text.blend import positions_in_documents
from data.text.config import DataConfig
from kernels.loss import cross_entropy_sum
from model.registry import build_model
from parallel.context import METHODS, context_parallel, make_plan, plan
from parallel.context.config import ContextConfig
from parallel.context.plan import PLANS
from parallel.mesh import MeshConfig
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.data.text.corpora import document_starts, write_documents
from tests.model.models import as_family, model_config
from train.config.entries import Config, TrainConfig
from train.context_attention import context_of
from train.objectives.language import NextToken, corpus_entropy

LENGTH = 13  # of which neither 2 nor 3 ranks have equal parts
LLAMA = model_config(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=29)
GPT = as_family(LLAMA, "gpt", max_position_embeddings=LENGTH)


def whole_batch():
    tokens = torch.randint(29, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[1, 4:9] = IGNORE_INDEX
    return {"tokens": tokens[:, :-1], "labels": labels}


def share(rank, world_size, method, shape):
    import torch.distributed as dist

    config = Config(
        context=ContextConfig(context_parallel_method=method),
        mesh=MeshConfig(device="cpu", context_parallel_size=world_size),
        train=TrainConfig(seq_length=LENGTH),
    )
    cp, attend = context_of(config, dist.group.WORLD)
    model = build_model(shape, attend)
    model.init_weights(3)
    objective = NextToken(cp, torch.device("cpu"))
    local = objective.local(whole_batch())
    return local, cp.positions, int(local["count"]), objective.loss_sum(model, local).item()


@pytest.mark.parametrize(
    ("method", "size", "shape"),
    [*((method, 3, LLAMA) for method in METHODS), ("ring", 1, LLAMA), ("striped", 3, GPT)],
    ids=[*METHODS, "alone", "gpt"],
)
def test_shares_make_up_the_batch_and_its_loss(method, size, shape):
    size = min(size, 2) if method == "ulysses" else size  # as many as the heads
    shares = run_ranks(share, size, method, shape)
    whole = whole_batch()
    seen_positions = []
    for rank, (local, positions, _, _) in enumerate(shares):
        assert torch.equal(positions, make_plan(method, seq_len=LENGTH, size=size).positions(rank))
        for column, position in enumerate(positions.tolist()):
            if position < LENGTH:
                seen_positions.append(position)
                assert torch.equal(local["tokens"][:, column], whole["tokens"][:, position])
                assert torch.equal(local["labels"][:, column], whole["labels"][:, position])
            else:
                assert (local["labels"][:, column] == IGNORE_INDEX).all(), "padding carries no loss"
    assert sorted(seen_positions) == list(range(LENGTH))
    assert sum(count for _, _, count, _ in shares) == 2 * LENGTH - 5
    model = build_model(shape)
    model.init_weights(3)
    want = cross_entropy_sum(model(whole["tokens"]), whole["labels"])[0].item()
    assert sum(loss for *_, loss in shares) == pytest.approx(want, rel=1e-6)


def test_positions_of_padding_have_no_entry_of_their_own_in_a_table():
    """Negative control: the plan's positions as they are.

    NextToken has those of the sequence alone.
    """
    model = build_model(GPT)
    model.init_weights(3)
    positions = make_plan("striped", seq_len=LENGTH, size=3).positions(1)
    tokens = torch.zeros(1, len(positions), dtype=torch.int64)
    assert positions.max() >= LENGTH
    with pytest.raises(IndexError):
        model(tokens, positions)


class Largest(TorchDispatchMode):
    """The most elements that any operator returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("untied", [True, False])
@pytest.mark.parametrize("size", [1, 5, 100])
def test_a_loss_in_chunks_is_the_loss_and_never_has_all_logits(size, untied):
    vocabulary = 500  # logits of all tokens are by far the largest tensor, those of a few are not
    config = replace(LLAMA, vocab_size=vocabulary, untie_embeddings_and_output_weights=untied)
    model = build_model(config).double()
    model.init_weights(3)
    losses, largest = [], []
    for chunk in (0, size):
        objective = NextToken(context_parallel("ring", seq_len=LENGTH), torch.device("cpu"), chunk)
        with Largest() as tracker:
            loss = objective.loss_sum(model, objective.local(whole_batch()))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses.append([loss.detach(), *gradients])
        largest.append(tracker.elements)
    for a, b in zip(*losses, strict=True):
        assert (a - b).norm() <= 1e-14 * b.norm()
    assert largest[0] == 2 * LENGTH * vocabulary
    assert largest[1] == max(min(size, 2 * LENGTH) * vocabulary, vocabulary * LLAMA.hidden_size)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("transnormer", "aten"), ("transnormer", "triton"), ("llama", "flash_attn_3")],
)
def test_a_backend_that_is_not_for_the_model_or_the_device_is_a_user_error(kind, backend):
    config = Config(
        model=as_family(LLAMA, kind),
        context=ContextConfig(attention_backend=backend),
        mesh=MeshConfig(device="cpu"),
        train=TrainConfig(bf16=kind == "llama"),
    )
    with pytest.raises(UserError, match=backend):
        context_of(config, None)


def test_entropy_of_one_corpus_and_of_no_blend(tmp_path):
    prefix = write_documents(tmp_path / "even", [[0, 1, 2, 3], [0, 1, 2, 3]])
    data_config = DataConfig(data_path=(prefix,))
    assert corpus_entropy(data_config)["unigram_entropy"] == pytest.approx(
        torch.tensor(4.0).log().item(), rel=1e-6
    )
    assert corpus_entropy(replace(data_config, data_path=("0.5", prefix, "0.5", prefix))) == {}


def test_validation_line_tells_what_frequencies_alone_would_give():
    objective = NextToken(context_parallel("ring", seq_len=LENGTH), torch.device("cpu"))
    line = objective.validation_line(
        {"iteration": 50, "validation_loss": 2.0, "unigram_entropy": 5.5}
    )
    assert line.endswith(": 2.0000 | perplexity: 7.39 | unigram entropy of the corpus: 5.5000")
    assert "unigram" not in objective.validation_line({"iteration": 50, "validation_loss": 2.0})
    assert "perplexity" in objective.validation_line({"iteration": 1, "validation_loss": 1e6}), (
        "no overflow"
    )


ROWS, LENGTH, EOD = 2, 13, 0
DEEP = model_config(
    num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=29, init_method_std=0.2
)
CPU = torch.device("cpu")


def packed_batch():
    """Ends at 3 and 7 of the first row, at 0 and 12 of the second."""
    tokens = torch.randint(1, 29, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    for place in ((0, 3), (0, 7), (1, 0), (1, 12)):
        tokens[place] = EOD
    labels = tokens[:, 1:].clone()
    labels[1, 4:6] = IGNORE_INDEX
    return {
        "tokens": tokens[:, :-1],
        "labels": labels,
        "starts": document_starts(tokens[:, :-1], EOD),
    }


def joined(*flags, multiple=1):
    joined = ROWS if "reset_attention_mask" in flags else 1
    cp = context_parallel("ring", seq_len=joined * LENGTH, multiple=multiple)
    return NextToken(cp, CPU, **dict.fromkeys(flags, True))


def attending():
    model = build_model(DEEP, context_parallel("ring", seq_len=ROWS * LENGTH).attend)
    model.init_weights(3)
    return model


def test_without_a_flag_a_batch_is_as_it_was():
    batch = packed_batch()
    local = joined().local(batch)
    assert local.keys() == {"tokens", "labels", "count"}
    assert all(torch.equal(local[name], batch[name]) for name in ("tokens", "labels"))
    assert int(local["count"]) == ROWS * LENGTH - 2


def test_samples_are_joined_into_one_sequence_and_padding_carries_nothing():
    batch, objective = (
        packed_batch(),
        joined("reset_attention_mask", "reset_position_ids", multiple=4),
    )
    local = objective.local(batch)
    assert {name: tuple(value.shape) for name, value in local.items()} == {
        **dict.fromkeys(("tokens", "labels", "positions"), (1, 28)),
        "plan": (1,),
        "count": (1,),
    }
    for name in ("tokens", "labels"):
        assert torch.equal(local[name][0, : ROWS * LENGTH], batch[name].flatten())
    assert torch.equal(
        local["positions"][0, : ROWS * LENGTH], positions_in_documents(batch["starts"]).flatten()
    )
    assert local["positions"][0, ROWS * LENGTH :].tolist() == [0, 0]
    assert local["labels"][0, ROWS * LENGTH :].tolist() == [IGNORE_INDEX] * 2
    assert PLANS[local["plan"]].cu_seqlens == (0, 4, 8, 13, 14, 26)
    assert objective.lengths(local) == [4, 4, 5, 1, 12], "FLOPs count attention inside documents"
    assert joined().lengths(joined().local(batch)) == [LENGTH] * ROWS
    name, like = objective.first_input(ROWS)
    assert (name, like.shape) == ("tokens", (1, 28))
    assert int(local["count"]) == int((batch["labels"] != IGNORE_INDEX).sum()) == ROWS * LENGTH - 2


def test_positions_restart_alone_or_attention_is_apart_alone():
    """Each flag for itself, as in Megatron.

    Samples as they are with positions of documents, or the reverse.
    """
    batch = packed_batch()
    restarted, apart = (
        joined("reset_position_ids").local(batch),
        joined("reset_attention_mask").local(batch),
    )
    assert restarted.keys() == {"tokens", "labels", "positions", "count"}
    assert torch.equal(restarted["positions"], positions_in_documents(batch["starts"]))
    assert torch.equal(apart["positions"][0], torch.arange(LENGTH).repeat(ROWS))
    plain = build_model(DEEP)
    plain.init_weights(3)
    want = cross_entropy_sum(plain(batch["tokens"], restarted["positions"]), batch["labels"])[0]
    got = joined("reset_position_ids").loss_sum(plain, restarted)
    torch.testing.assert_close(got, want)
    assert abs(got - cross_entropy_sum(plain(batch["tokens"]), batch["labels"])[0]) > 1e-3


@pytest.mark.parametrize("restart", [True, False])
def test_the_loss_is_that_of_the_documents_alone(restart):
    """Rotary positions need not restart: only their differences count."""
    batch, flags = packed_batch(), ("reset_attention_mask", *(["reset_position_ids"] * restart))
    objective, plain = joined(*flags), build_model(DEEP)
    plain.init_weights(3)
    local = objective.local(batch)
    bounds = (0, 4, 8, 13, 14, 26)
    tokens, labels = batch["tokens"].flatten(), batch["labels"].flatten()
    want = sum(
        cross_entropy_sum(plain(tokens[None, begin:end]), labels[None, begin:end])[0]
        for begin, end in pairwise(bounds)
    )
    torch.testing.assert_close(objective.loss_sum(attending(), local), want)


def test_the_plan_of_a_micro_batch_lives_as_long_as_its_batch():
    """A pipeline joins a step's micro-batches and takes them apart.

    The parts do not keep the plans, the batches do.
    """
    objective = joined("reset_attention_mask")
    batches = [objective.local(packed_batch()), objective.local(replaced(packed_batch()))]
    parts = torch.cat([batch["plan"] for batch in batches]).chunk(2)
    plan._packed.cache_clear()
    gc.collect()
    assert [len(PLANS[part].cu_seqlens or ()) for part in parts] == [6, 5]
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
    config = as_family(DEEP, "gpt", max_position_embeddings=LENGTH)
    gpt = build_model(config, context_parallel("ring", seq_len=ROWS * LENGTH).attend)
    gpt.init_weights(3)
    objective = joined("reset_attention_mask", "reset_position_ids")
    assert torch.isfinite(objective.loss_sum(gpt, objective.local(packed_batch())))

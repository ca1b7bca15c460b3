"""Training a sharded model over two ranks.

Loss, labels, checkpointing, adapters, FSDP2, and its own check.
"""

from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from parallel.comparison import Float64Mode, ModuleErrors, Report
from parallel.transformers import shard
from parallel.transformers.batch import IGNORED
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.parallel.transformers.families import (
    LENGTH,
    PACKED,
    averaged,
    data_parallel,
    difference,
    fully_sharded,
    model_of,
    one_process,
    tokens,
)

HEADS = 2


def plain(model, cp, batch):
    return averaged(cp.loss(model(**batch.inputs), batch), model)


def checkpointed(model, cp, batch):
    """Layers are computed again in the backward, after another batch was made."""
    model.activation_checkpointing_enable(
        {"use_reentrant": False, "context_fn": lambda: (nullcontext(), Float64Mode())}
    )
    loss = cp.loss(model(**batch.inputs), batch)
    cp.batch(*tokens(20, seed=4))
    return averaged(loss, model)


def in_parts(model, cp, batch):
    """Two micro-batches, of which each is divided by the tokens of both."""
    ids, labels = (batch.whole.tokens["input_ids"], tokens(LENGTH)[1])
    halves = [
        cp.batch(ids[:, a:b], labels[:, a:b], documents=documents)
        for a, b, documents in ((0, 27, PACKED[:3]), (27, LENGTH, PACKED[3:]))
    ]
    count = (batch.whole.tokens["labels"] != IGNORED).sum()
    return averaged(sum(cp.loss(model(**half.inputs), half, count) for half in halves), model)


def shifted_after_cutting(model, cp, batch):
    """Wrong: a rank whose tokens are not neighbours pairs them all the same."""
    whole_batch = cp.batch(*reversed(tokens(LENGTH)), documents=PACKED)
    uncut = whole_batch.context.shard(tokens(LENGTH)[1], 1, IGNORED)
    wrong = torch.cat([uncut[:, 1:], uncut.new_full((1, 1), IGNORED)], 1)
    return plain(model, cp, type(batch)(batch.inputs, wrong, batch.context, batch.whole))


WAYS = (plain, checkpointed, data_parallel, fully_sharded, in_parts)


def trained(ways, families, method):
    """Errors of each way of training by family; every rank has the same loss."""
    errors, rank = {}, dist.get_rank()
    for family in families:
        with Float64Mode():
            truth = one_process(family, HEADS, *tokens(LENGTH), PACKED) if rank == 0 else None
            for way in ways:
                model = model_of(family, HEADS)
                cp = shard(model, dist.group.WORLD, method=method)
                batch = cp.batch(*tokens(LENGTH), documents=PACKED)
                mine = way(model, cp, batch)
                losses = [torch.empty_like(mine[0]) for _ in range(dist.get_world_size())]
                dist.all_gather(losses, mine[0])
                assert all(torch.equal(x, losses[0]) for x in losses)
                errors[family, way.__name__] = difference(mine, truth) if rank == 0 else 0
    return errors


def everything(rank, world_size):
    return {
        "right": trained(WAYS, ("GptOss", "Qwen3_5"), "zigzag"),
        "wrong": trained((shifted_after_cutting,), ("Llama",), "zigzag"),
        "checked": checked(),
        "refused": refused(rank),
        "gathered": gathered(),
        "adapted": adapted() if find_spec("peft") else None,
    }


@pytest.fixture(scope="module")
def results():
    """Each of two ranks does everything once, and imports transformers once."""
    return run_ranks(everything, 2)


def test_ways_of_training_give_the_gradients_of_one_process(results):
    assert {name: error for name, error in results[0]["right"].items() if not error < 1e-10} == {}


def test_labels_that_are_shifted_after_cutting_are_seen(results):
    (error,) = results[0]["wrong"].values()
    assert error > 1e-2


def checked():
    """Reports of a right model in float64 and float32, and of one with wrong positions."""
    reports = []
    for dtype in (torch.float64, torch.float32):
        with Float64Mode() if dtype == torch.float64 else nullcontext():
            model = model_of("Qwen3_5", HEADS, dtype)
            cp = shard(model, dist.group.WORLD)
            batch = cp.batch(*tokens(LENGTH), documents=PACKED)
            reports.append(cp.check(model, batch))
    batch.inputs["position_ids"] = (
        batch.inputs["position_ids"] + torch.arange(batch.labels.shape[1]) % 2
    )
    reports.append(cp.check(DistributedDataParallel(model), batch))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    return reports


def test_a_model_is_compared_with_one_process_module_by_module(results):
    """Gates of the delta rule are off in transformers' float32.

    They are not taken for the ranks' fault.
    """
    (exact, right, wrong), other = (result["checked"] for result in results)
    assert [exact, right, wrong] == other
    assert max(row.ranks for row in exact.rows) < 1e-10
    assert exact.right
    assert right.worst < 3
    assert wrong.worst > 1e4
    assert not wrong.right
    rows = {row.module: row for row in right.rows}
    assert {
        "model.layers.0.linear_attn",
        "model.layers.1.self_attn.q_proj",
        "lm_head",
    } <= rows.keys()
    gates = rows["model.layers.2.linear_attn"]
    assert gates.ranks < 1e-5 < 1e-4 < gates.one_process
    lines = str(right).splitlines()
    assert lines[0].split() == ["module", "parameters", "ranks", "one", "process"]
    assert lines[-2].startswith(
        f"loss {right.sharded:.12g} on the ranks, {right.one_process:.12g} in one process"
    )
    assert lines[-1].startswith("right: the ranks are up to")
    assert "wrong" not in str(right)
    assert str(wrong).count("  wrong") == len(wrong.rows)
    assert str(wrong).endswith("as one process, and 10 is the limit")


def test_a_process_that_was_exact_by_chance_does_not_condemn_the_ranks():
    """In float32; in bfloat16 a thousand roundings would hide everything.

    What is not a number is never right.
    """
    small = ModuleErrors("b", 1, 1e-7, 1e-7)
    report = Report(1.0, 1.0, 1.0, 2.0**-23, [ModuleErrors("a", 1, 2e-5, 1e-7), small])
    assert report.worst > 10
    assert report.right
    assert str(report).endswith("10 is the limit for errors above 1.2e-04")
    for row, rounding in (
        ((2e-4, 1e-7), 2.0**-23),
        ((1e-1, 1e-7), 7.8e-3),
        ((torch.nan, 1e-7), 1e-7),
    ):
        assert not Report(1.0, 1.0, 1.0, rounding, [ModuleErrors("a", 1, *row), small]).right
    assert not Report(torch.nan, 1.0, 1.0, 1e-7, [small]).right


def no_memory():
    raise MemoryError("64 GiB")


def refused(rank):
    """Messages about wrong uses."""
    model = model_of("Llama", HEADS)
    cp = shard(model, dist.group.WORLD)
    batch = cp.batch(*tokens(LENGTH), documents=PACKED)
    quantised, frozen, large = (model_of("Llama", HEADS) for _ in range(3))
    of_quantised, of_frozen, of_large = (
        shard(x, dist.group.WORLD) for x in (quantised, frozen, large)
    )
    frozen.requires_grad_(False)
    large.double = no_memory  # of its copy, on rank 0 alone
    quantised.lm_head.weight = torch.nn.Parameter(
        quantised.lm_head.weight.char(), requires_grad=False
    )
    messages = []
    for call in (
        lambda: cp.batch(tokens(LENGTH)[0] + rank),
        lambda: cp.batch(tokens(LENGTH)[0], documents=(LENGTH - 1 - rank, 1 + rank)),
        lambda: cp.batch(tokens(LENGTH)[0], tokens(LENGTH)[0] + rank),
        lambda: cp.batch(
            tokens(8)[0], position_ids=torch.arange(8)[None], documents=(4 + rank, 4 - rank)
        ),
        lambda: cp.check(model, cp.batch(tokens(LENGTH)[0])),
        lambda: of_quantised.check(quantised, batch),
        lambda: cp.check(quantised, batch),
        lambda: of_frozen.check(frozen, batch),
        lambda: of_large.check(large, batch),
        lambda: cp.check(fully_shard(model), batch),
    ):
        with pytest.raises(UserError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_wrong_uses_are_refused_on_every_rank(results):
    messages, other = (result["refused"] for result in results)
    assert messages == other
    beginnings = (
        "input_ids differ between the group's rank 0 and its ranks [1]",
        "documents, position_ids differ between the group's rank 0 and its ranks [1]",
        "labels differ between the group's rank 0 and its ranks [1]",
        "documents differ between the group's rank 0 and its ranks [1]",
        "the batch has no labels",
        "lm_head.weight is quantised",
        "the model given to check is not the one that shard was called with",
        "no parameter of the model is trained",
        "the group's rank 0 could not run the model by itself (MemoryError: 64 GiB)",
        "the model's weights are sharded",
    )
    for message, beginning in zip(messages, beginnings, strict=True):
        assert message.startswith(beginning)


def gathered():
    """Logits of padded rows from all ranks."""
    model = model_of("Llama", HEADS).eval()
    ids = torch.stack([tokens(12)[0][0], tokens(12, seed=4)[0][0]])
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    expected = model(ids, attention_mask=mask).logits * mask[:, :, None]
    cp = shard(model, dist.group.WORLD)
    batch = cp.batch(ids, attention_mask=mask)
    with torch.no_grad():
        logits = cp.gather(model(**batch.inputs).logits)
    return float((logits - expected).abs().max() / expected.abs().max())


def test_logits_of_all_ranks_are_those_of_the_batch(results):
    assert max(result["gathered"] for result in results) < 1e-6


def adapted():
    """Adapters of a model that is sharded before, and of one that is sharded after."""
    from peft import LoraConfig, get_peft_model

    def lora(model):
        torch.manual_seed(5)
        config = LoraConfig(
            r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
        )
        return get_peft_model(model, config)

    def losses(model, cp):
        batch = cp.batch(*tokens(LENGTH), documents=PACKED)
        report = cp.check(model, batch)
        assert {row.module.rpartition(".")[2] for row in report.rows} == {"default"}
        assert report.right
        return max(row.ranks for row in report.rows)

    run_losses = []
    with Float64Mode():
        model = model_of("Qwen3_5", HEADS)
        cp = shard(model, dist.group.WORLD)
        run_losses.append(losses(lora(model), cp))
        model = lora(model_of("Qwen3_5", HEADS))
        run_losses.append(losses(model, shard(model, dist.group.WORLD)))
    return run_losses


def test_adapters_are_trained_as_in_one_process(results):
    pytest.importorskip("peft")
    assert max(results[0]["adapted"]) < 1e-10


def test_check_is_refused_while_paused_and_needs_no_gradient_mode():
    model = model_of("Llama", 2)
    cp = shard(model)
    batch, ours = cp.batch(*tokens(9)), model.config._attn_implementation
    with cp.paused(), cp.paused():
        implementation = model.config._attn_implementation
    with cp.paused():
        with cp.paused():
            pass
        assert model.config._attn_implementation == implementation != ours
        with pytest.raises(
            UserError,
            match=r"the model uses its own attention within paused\(\), .*; call check outside",
        ):
            cp.check(model, batch)
    with torch.no_grad():
        assert cp.check(model, batch).right


def test_without_ranks_the_loss_is_the_mean_over_labels():
    model = model_of("Llama", 2).eval()
    cp = shard(model)
    batch, count = cp.batch(*tokens(9)), 3
    after, logits = batch.whole.tokens["labels"][0], model(**batch.inputs).logits
    expected = torch.nn.functional.cross_entropy(logits[0], after, ignore_index=IGNORED)
    assert torch.allclose(cp.loss(logits, batch), expected)
    assert torch.allclose(
        cp.loss(logits, batch, count=count), expected * (after != IGNORED).sum() / count
    )
    assert cp.loss(logits, cp.batch(tokens(9)[0])).item() == 0

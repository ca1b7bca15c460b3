"""Slices on ranks that do not split the heads: queries travel, and keys stay (allgather_q)."""

from dataclasses import replace

import pytest
import torch

from kernels.blocks import with_sinks
from parallel.context import context_parallel, make_plan
from parallel.context.executor import Executor
from parallel.context.layout import ContextError
from runtime.ranks import run_ranks
from tests.parallel.context.slices.models import (
    PACKED,
    furthest,
    planned_bytes,
    recorded_outputs,
    run_again_alike,
    step,
)
from tests.parallel.context.slices.test_layer import EXACT, MODELS

SIZES = (6, 4, 2)
"""Tokens of a rank in a slice, for two ranks; the zigzag layout has two chunks of each rank."""
OTHER_SIZES = [
    # sequences, length, documents, tokens of a rank in a slice
    (3, 24, None, 6),
    (2, 21, None, 4),
    (1, 23, (0, 1, 2, 9, 23), 6),
    (1, 5, None, 8),
]
CASES = [
    ("llama", None),
    ("llama", PACKED),
    ("llama window", None),
    ("llama sinks and windows", PACKED),
    ("llama adapters of queries", None),
    ("llama of one head", PACKED),
    ("gemma3", None),
]
MODELS = MODELS | {
    "llama of one head": replace(MODELS["llama"], num_attention_heads=1, num_query_groups=1)
}
HYBRIDS = [("qwen3_5", None), ("qwen3_5", PACKED), ("kimi delta attention", PACKED)]


def on_ranks(rank, world_size, cases, sizes, options):
    """Return each case's largest difference from one process, and the bytes sent and planned."""
    group = torch.distributed.group.WORLD
    results = []
    for name, documents in cases:
        config = MODELS[name]
        whole, _ = step(config, documents=documents, granularity="none")
        for size in sizes:
            context = {"method": "allgather_q", **options}
            in_slices, sent = step(config, size, documents=documents, group=group, **context)
            planned = planned_bytes(config, rank, world_size, documents, slice_len=size, **context)
            results.append((name, furthest(in_slices, whole), sent, planned))
    return results


@pytest.mark.parametrize(
    ("ranks", "degree"),
    [
        (2, 1),
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(4, 2, marks=pytest.mark.slow),
    ],
)
def test_queries_travel_to_keys_that_stay_and_send_what_the_plan_counts(ranks, degree):
    """The bytes do not depend on the number of slices. One head cannot be split by two ranks."""
    cases = [
        (name, documents) for name, documents in CASES if degree == 1 or "one head" not in name
    ]
    for results in run_ranks(on_ranks, ranks, cases, SIZES, {"ulysses_degree": degree}):
        for name, difference, sent, planned in results:
            assert difference < EXACT, name
            if "adapters" not in name:  # frozen layers send no gradients of keys
                assert sent == planned, name


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_delta_rule_splits_its_heads_among_all_ranks(ranks):
    """The keys of softmax layers stay, while the delta rule's heads are exchanged."""
    for results in run_ranks(on_ranks, ranks, HYBRIDS, (3, 2), {"layout": "contiguous"}):
        assert all(difference < EXACT for _, difference, _, _ in results), results


def of_other_sizes(rank, world_size, name):
    """Return the largest differences from one process for batches, padding and short slices."""
    group = torch.distributed.group.WORLD
    differences = []
    for sequences, length, documents, size in OTHER_SIZES:
        sizes = {"sequences": sequences, "length": length, "documents": documents}
        whole, _ = step(MODELS[name], granularity="none", **sizes)
        in_slices, _ = step(MODELS[name], size, group=group, method="allgather_q", **sizes)
        differences.append(furthest(in_slices, whole))
    return differences


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_batches_lengths_that_are_padded_and_slices_of_all_tokens(ranks):
    for differences in run_ranks(of_other_sizes, ranks, "llama sinks and windows"):
        assert max(differences) < EXACT


def refusal_of_zigzag(rank, world_size):
    """Return the message of a delta rule whose slices are zigzag over the ranks."""
    group = torch.distributed.group.WORLD
    cp = context_parallel("allgather_q", seq_len=8, group=group, slice_len=2)
    with pytest.raises(ContextError) as caught:
        cp.delta_of_slices(None)
    return str(caught.value)


def test_a_delta_rule_in_zigzag_slices_is_refused():
    for message in run_ranks(refusal_of_zigzag, 2):
        assert "layout is zigzag, but a delta rule" in message


def of_this_rank_alone(executor, gradient):
    """Gradients of queries have no part of other ranks' keys."""
    team = executor.geometry.teammates(executor.rank)
    return executor.transport.scatter(gradient, team)[team.index(executor.rank)]


def with_sinks_of_every_rank(executor, out, lse, sinks, combine=Executor.combine):
    """The sinks take part on every rank, before the ranks' results are merged."""
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return combine(executor, out, lse, None)


FAULTS = {"reduce_team": of_this_rank_alone, "combine": with_sinks_of_every_rank}


def with_fault(rank, world_size, name):
    """Return the largest difference from one process, with a fault in a step of the executor."""
    config = MODELS["llama sinks and windows"]
    whole, _ = step(config, granularity="none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, name, FAULTS[name])
        group = torch.distributed.group.WORLD
        return furthest(step(config, 6, group=group, method="allgather_q")[0], whole)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_between_ranks_is_noticed(name):
    assert min(run_ranks(with_fault, 2, name)) > 1e-3


def bits(rank, world_size, dtype):
    """Return True if every slice computes the same bits when it runs again."""
    with pytest.MonkeyPatch.context() as patch:
        outputs = recorded_outputs(patch)
        group = torch.distributed.group.WORLD
        context = {"group": group, "method": "allgather_q"}
        step(MODELS["llama sinks and windows"], 4, documents=PACKED, dtype=dtype, **context)
    return run_again_alike(outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slice_that_runs_again_computes_the_same_bits(dtype):
    assert all(run_ranks(bits, 2, dtype))


def test_gigabytes_of_the_pages_table():
    """LLaMA 3 8B, 1M tokens, bfloat16: docs/concepts/layers_in_slices.md."""

    def gigabytes(method, ranks, passes=1.0, **options):
        plan = make_plan(method, seq_len=1 << 20, size=ranks, **options)
        cost = plan.cost(ranks - 1, batch=1, heads=32, kv_heads=8, head_dim=128, element_size=2)
        sent = (cost.forward.total, cost.backward.total)
        return tuple(round(32 * passes * total / 1e9) for total in sent)

    assert gigabytes("ulysses", 8) == (75, 75)
    assert gigabytes("ulysses", 32) == (33, 33)
    for ranks, sent in ((8, (1984, 6520)), (32, (2197, 6732)), (64, (2232, 6768))):
        assert gigabytes("zigzag", ranks, passes=16.5) == sent
    for ranks, degree, sent in (
        (8, 1, (725, 1206)),
        (32, 1, (803, 1336)),
        (64, 1, (816, 1357)),
        (32, 8, (97, 148)),
        (64, 8, (100, 160)),
        (32, 16, (50, 67)),
        (64, 16, (51, 77)),
    ):
        assert gigabytes("allgather_q", ranks, ulysses_degree=degree, slice_len=1024) == sent


def test_each_slice_is_zigzag_over_the_ranks():
    """Chunks 0 and 3, and 1 and 2, of every slice; the last one is shorter."""
    plan = make_plan("allgather_q", seq_len=12, size=2, slice_len=4)
    assert plan.positions(0).tolist() == [0, 1, 6, 7, 8, 11]
    assert plan.positions(1).tolist() == [2, 3, 4, 5, 9, 10]
    tensor_parallel = make_plan("allgather_q", seq_len=16, size=2, slice_len=4, multiple=2)
    assert tensor_parallel.positions(0).tolist() == [0, 1, 8, 9, 6, 7, 14, 15]
    blocks = make_plan("allgather_q", seq_len=12, size=2, slice_len=4, layout="contiguous")
    assert blocks.positions(1).tolist() == [4, 5, 6, 7, 10, 11]
    odd = make_plan("allgather_q", seq_len=12, size=2, slice_len=3)
    with pytest.raises(ContextError, match="slices of 3 tokens of each rank cannot"):
        odd.positions(0)

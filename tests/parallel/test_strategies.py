"""Each data-parallel strategy divides, sends and sums as its name says.

It does so with tensor parallelism and in bfloat16 too.
"""

from contextlib import contextmanager
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from model.parts.linear_attention import LRPE
from parallel.data import (
    DataParallelConfig,
    Strategy,
    finish_gradients,
    set_gradient_sync,
    shard_model,
    to_local,
    untracked_replicas,
)
from parallel.mesh import distributed_mesh
from runtime.ranks import run_ranks
from tests.model.models import model_config
from tests.parallel import split
from tests.parallel.tiny import gradients_of
from tests.parallel.unequal import difference, gradient_norm_of, loss_sum, sharded, whole_model
from train.gradients import gradient_norm

STRATEGIES = get_args(Strategy)
CASES = {
    2: [*((strategy, 1) for strategy in STRATEGIES), ("zero3", 2)],
    3: [(strategy, 1) for strategy in STRATEGIES],
    4: [("zero1", 2), ("zero2", 2), ("zero3", 2)],
}
"""Strategies and copies of what is divided, by ranks."""


def shares(strategy, ranks, copies):
    """Copies over all ranks of the weights and their gradients.

    They are counted between micro-batches, then after a step.

    Between micro-batches of zero2 and zero3 the gradients are in shards: of the weights with one
    copy; with more, not yet with the weights at all.
    """
    if strategy in ("ddp", "legacy_ddp"):
        return [ranks] * 4
    first = {"zero1": [ranks, ranks], "zero2": [ranks, 0], "zero3": [copies, copies % 2]}[strategy]
    return [*first, copies, copies]


def traffic(strategy, ranks, copies):
    """The collectives of gradients, each with its number of ranks.

    They are those in the first and last micro-batch and after it.
    """
    scatter, reduce = (
        ("reduce_scatter", ranks // copies),
        ("all_reduce", copies if copies > 1 else ranks),
    )
    if strategy in ("ddp", "legacy_ddp"):
        return [set(), *([{reduce}, set()] if strategy == "ddp" else [set(), {reduce}])]
    every = {scatter} if ranks > copies else set()
    return [
        set() if strategy == "zero1" else every,
        every | ({reduce} if copies > 1 else set()),
        set(),
    ]


@contextmanager
def recorded():
    """The collectives that send gradients, and among how many ranks, more than one."""
    calls = []

    def recording(name, original):
        def call(*args, group=None, **kwargs):
            size = dist.get_world_size(group)
            calls.extend([(name, size)] if size > 1 else [])
            return original(*args, group=group, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "all_reduce",
            "reduce_scatter_tensor",
            "reduce_scatter_single",
        ):  # the last is torch 2.13's
            if original := getattr(dist, name, None):
                patch.setattr(
                    dist,
                    name,
                    recording(name.removesuffix("_tensor").removesuffix("_single"), original),
                )
        yield calls


def elements(model, what):
    """The number of elements of the weights, or of their gradients, on this rank."""
    tensors = [
        parameter if what == "weights" else parameter.grad for parameter in model.parameters()
    ]
    return sum(to_local(t).numel() for t in tensors if t is not None)


def accumulated(rank, world_size, strategy, copies=1, bf16=False, finish=True):
    """Gradients of two micro-batches, what was sent, and the norm.

    Between them: what this rank held after the first and at the end.
    """
    model = sharded(world_size, bf16, strategy, copies)
    mesh = init_device_mesh("cpu", (world_size,))
    elements_held, sent = [], []
    for micro in range(2):
        set_gradient_sync(model, micro == 1, strategy)
        with recorded() as calls:
            (loss_sum(model, rank, micro) / 10).backward()
        sent.append(calls)
        elements_held += [elements(model, "weights"), elements(model, "gradients")]
    with recorded() as calls:
        if finish:
            finish_gradients(model, mesh, strategy)
    sent.append(calls)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    norm = gradient_norm(model.parameters(), copies=untracked_replicas(mesh, strategy)).item()
    return gradients_of(model), elements_held, sent, norm


def accumulated_in_one_process(ranks):
    model = whole_model()
    sum(loss_sum(model, rank, micro) / 10 for rank in range(ranks) for micro in range(2)).backward()
    return gradients_of(model)


def each_accumulated(rank, world_size, cases):
    return [accumulated(rank, world_size, strategy, copies) for strategy, copies in cases]


@pytest.mark.parametrize("ranks", CASES)
def test_micro_batches_accumulate_and_each_strategy_divides_and_sends_what_it_says(ranks):
    want, size = accumulated_in_one_process(ranks), elements(whole_model(), "weights")
    by_case = zip(*run_ranks(each_accumulated, ranks, CASES[ranks]), strict=True)
    for (strategy, copies), results in zip(CASES[ranks], by_case, strict=True):
        for got, _, sent, norm in results:
            assert difference(got, want) < 1e-5
            assert norm == pytest.approx(gradient_norm_of(want), rel=1e-6)
            assert [set(calls) for calls in sent] == traffic(strategy, ranks, copies), strategy
            assert strategy != "legacy_ddp" or len(sent[2]) == 1
        totals = [
            sum(elements_held[index] for _, elements_held, _, _ in results) for index in range(4)
        ]
        assert totals == [share * size for share in shares(strategy, ranks, copies)], strategy


def other_ways(rank, world_size):
    """legacy_ddp whose gradients nothing sums; ddp and legacy_ddp in bfloat16."""
    not_summed = accumulated(rank, world_size, "legacy_ddp", finish=False)
    return [
        not_summed,
        *(accumulated(rank, world_size, name, bf16=True) for name in ("ddp", "legacy_ddp")),
    ]


def test_what_legacy_ddp_does_not_sum_would_be_seen_and_in_bf16_it_is_ddp_to_the_bit():
    want = accumulated_in_one_process(2)
    for (not_summed, *_, norm), (ddp, *_), (legacy, *_) in run_ranks(other_ways, 2):
        assert difference(not_summed, want) > 0.1
        assert abs(norm / gradient_norm_of(want) - 1) > 0.1
        assert all(torch.equal(legacy[name], ddp[name]) for name in ddp)
        assert 1e-4 < difference(ddp, want) < 0.1


def refused(rank, world_size):
    model, mesh = whole_model(), init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_cp",))
    with pytest.raises(ValueError, match="the mesh has 2 ranks instead of 1"):
        shard_model(model, model.layers, mesh, bf16=False, strategy="legacy_ddp")


def test_legacy_ddp_over_ranks_that_the_library_sums_over_too_is_refused():
    run_ranks(refused, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_distributed_optimizer_instances": 0}, "instances is 0; it must be 1 or more"),
        (
            {
                "num_distributed_optimizer_instances": 2,
                "data_parallel_sharding_strategy": "legacy_ddp",
            },
            (
                "instances is 2, but data_parallel_sharding_strategy legacy_ddp shards nothing; .* "
                "to 1, or the strategy to zero1"
            ),
        ),
    ],
)
def test_a_wrong_number_of_copies_is_named(settings, words):
    with pytest.raises(ValueError, match=words):
        DataParallelConfig(**settings)


def test_fsdp_is_zero3():
    assert DataParallelConfig(data_parallel_sharding_strategy="fsdp").strategy == "zero3"


CONFIG = model_config(
    model_type="transnormer", num_layers=2, hidden_size=24, num_attention_heads=2, vocab_size=37
)
ANGLES = "layers.0.attention.lrpe.theta"


def gradients(rank, world_size, strategy, granularity="none", data_rank=None):
    """Gradients of a TransNormer in bfloat16 over two micro-batches.

    Its angles are seen in float32.
    """
    dtypes = []
    forward = LRPE.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            LRPE,
            "forward",
            lambda self, *inputs: dtypes.append(self.theta.dtype) or forward(self, *inputs),
        )
        model = sharded(world_size, True, strategy, config=CONFIG, granularity=granularity)
        for micro in range(2):
            set_gradient_sync(model, micro == 1, strategy)
            loss_sum(model, rank if data_rank is None else data_rank, micro).backward()
        finish_gradients(model, init_device_mesh("cpu", (world_size,)), strategy)
    assert set(dtypes) == {torch.float32}
    assert (
        {p.dtype for p in model.parameters()}
        == {p.grad.dtype for p in model.parameters()}
        == {torch.float32}
    )
    return gradients_of(model)


def each_gradients(rank, world_size, cases):
    return [gradients(rank, world_size, *case) for case in cases]


def test_angles_stay_in_float32_and_gradients_are_summed():
    """Either rank's tokens by one process each, and both by two."""
    alone = [(("zero3", "none", rank),) for rank in range(2)]
    first_alone, two = (run_ranks(each_gradients, 1, cases)[0][0] for cases in alone)
    assert first_alone[ANGLES].norm() > 0
    want = {name: first_alone[name] + two[name] for name in first_alone}
    cases = [(strategy, granularity) for strategy in STRATEGIES for granularity in ("none", "full")]
    for results in run_ranks(each_gradients, 2, cases):
        for case, got in zip(cases, results, strict=True):
            assert difference(got, want) <= 1e-5, case


def of(strategy, copies=1):
    return DataParallelConfig(
        data_parallel_sharding_strategy=strategy, num_distributed_optimizer_instances=copies
    )


def step(rank, world_size, tp, cp, config):
    with distributed_mesh(split.mesh_config(tp, cp)) as mesh:
        model, rank_gradients = split.split_step(mesh, split.config(), data_parallel=config)
        return rank_gradients, gradient_norm(
            model.parameters(), copies=untracked_replicas(mesh.dp_cp, config.strategy)
        ).item()


@pytest.mark.parametrize(
    ("ranks", "cp", "strategy", "copies"),
    [
        pytest.param(8, 2, "zero3", 2, marks=pytest.mark.slow),
        (4, 2, "zero1", 2),
        (4, 1, "legacy_ddp", 1),
    ],
)
def test_with_tensor_parallelism_a_step_is_that_of_one_process(ranks, cp, strategy, copies):
    """The first on all dimensions: tp 2, in it 2 ranks that divide the weights, 2 copies."""
    want = split.whole_step(split.config())
    for got, norm in run_ranks(step, ranks, 2, cp, of(strategy, copies)):
        split.check_step(got, want)
        assert norm == pytest.approx(gradient_norm_of(want.gradients), rel=1e-6)

"""Layers in slices on meshes: loss and gradients are those of one process without slices."""

from typing import get_args

import pytest
import torch

from parallel.data import DataParallelConfig, Strategy
from parallel.mesh import distributed_mesh
from parallel.recompute import RecomputeConfig
from runtime.ranks import run_ranks
from tests.parallel.pipeline.test_schedule import ONE_F_ONE_B, compare, llama
from tests.parallel.pipeline.test_schedule import steps as pipeline_steps
from tests.parallel.split import (
    GRADIENT,
    check_step,
    config,
    mesh_config,
    plain,
    split_step,
    whole_step,
)

SLICES = RecomputeConfig(recompute_granularity="full", layer_chunk_size=4, loss_chunk_size=5)
"""17 tokens are padded; the last slice is shorter."""
OFFLOADED = RecomputeConfig(
    recompute_granularity="full", layer_chunk_size=4, recompute_offload=True
)
LLAMAS = [
    config(),
    config(tied=True, window_size="5,0", window_attn_skip_freq="2", softmax_type="learnable"),
]
DELTA = {
    "model_type": "qwen3_5",
    "num_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
BF16 = 2**-5
"""Bound of gradients in bfloat16, relative to their norm."""


def steps(rank, world_size, cp, tp, models, recompute, strategy, bf16=False, method="ulysses"):
    """Return a step of each model."""
    data_parallel = DataParallelConfig(data_parallel_sharding_strategy=strategy)
    results = []
    with distributed_mesh(mesh_config(tp, cp)) as mesh:
        for model_config in models:
            _, step = split_step(
                mesh, model_config, recompute, data_parallel, method=method, bf16=bf16
            )
            results.append(step)
    return results


def check(ranks, cp, tp, models=LLAMAS, recompute=SLICES, strategy="zero3", method="ulysses"):
    """Assert that every rank's steps are those of one process."""
    expected = [whole_step(model_config, plain(model_config, None)) for model_config in models]
    arguments = (cp, tp, models, recompute, strategy, False, method)
    for results in run_ranks(steps, ranks, *arguments):
        for step, whole in zip(results, expected, strict=True):
            check_step(step, whole, (cp, tp, strategy))


def test_context_parallel_ranks_with_sharded_weights():
    check(2, 2, 1)


def test_tensor_parallel_ranks():
    check(2, 1, 2)


def test_activations_on_the_host():
    check(2, 1, 1, recompute=OFFLOADED)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cp", "tp"), [(4, 2, 2), (4, 4, 1), (4, 2, 1), (4, 1, 2)])
def test_meshes_of_four_ranks(ranks, cp, tp):
    check(ranks, cp, tp)


def test_queries_that_travel_with_sharded_weights():
    check(2, 2, 1, [*LLAMAS, config(**DELTA)], method="allgather_q")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cp", "tp"), [(4, 2, 2), (4, 4, 1), (4, 2, 1)])
def test_queries_that_travel_on_meshes_of_four_ranks(ranks, cp, tp):
    check(ranks, cp, tp, method="allgather_q")


def pipelined_steps(rank, world_size, models, sizes):
    """Return the step of each model in pipeline stages, in slices."""
    cases = [(model_config, ONE_F_ONE_B, "zero1", sizes, SLICES) for model_config in models]
    return pipeline_steps(rank, world_size, cases)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["tensor_model", "context"])
def test_pipeline_stages(part):
    models = [llama(tied=True), config(**{**DELTA, "num_layers": 5})]
    sizes = {"pipeline_model_parallel_size": 2, f"{part}_parallel_size": 2}
    results = run_ranks(pipelined_steps, 4, models, sizes)
    for model_config, of_ranks in zip(models, zip(*results, strict=True), strict=True):
        assert compare(of_ranks, model_config) < GRADIENT


@pytest.mark.slow
@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_every_strategy(strategy):
    check(2, 1, 1, LLAMAS[:1], strategy=strategy)


@pytest.mark.parametrize(("ranks", "cp", "tp"), [(2, 2, 1), (2, 1, 2)])
def test_a_delta_rule(ranks, cp, tp):
    check(ranks, cp, tp, [config(**DELTA)])


def norm_of_difference(step, expected):
    """Return the norm of the difference of all gradients, relative to their norm."""
    difference = total = torch.zeros((), dtype=torch.float64)
    for name, gradient in expected.gradients.items():
        difference = difference + (step.gradients[name] - gradient).double().square().sum()
        total = total + gradient.double().square().sum()
    return (difference / total).sqrt().item()


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("ddp", marks=pytest.mark.slow)])
def test_modules_in_float32_inside_layers_in_bfloat16(strategy):
    """FSDP shards the gates of a delta rule by themselves; their gradients are reduced as well."""
    models = [config(**DELTA)]
    whole = whole_step(models[0], plain(models[0], None))
    full = RecomputeConfig(recompute_granularity="full")
    (unsliced,), _ = run_ranks(steps, 2, 1, 1, models, full, strategy, True)
    for (step,) in run_ranks(steps, 2, 1, 1, models, SLICES, strategy, True):
        assert step.gradients.keys() == whole.gradients.keys()
        assert norm_of_difference(step, whole) < max(BF16, 2 * norm_of_difference(unsliced, whole))
        for name, gradient in whole.gradients.items():
            if "gates" in name:
                error = (step.gradients[name] - gradient).norm() / gradient.norm()
                assert error < 0.1, name

"""Diffusion transformers of diffusers over gloo ranks against one process: loss, every gradient."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist

from parallel.comparison import Float64Mode
from parallel.diffusers import shard
from runtime.ranks import run_ranks
from tests.parallel.diffusers.cases import CASES, errors, gradients, inputs_of, loss_of, model_of

pytest.importorskip("diffusers", reason="shards the models of diffusers")

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6}
METHODS = {
    2: ("ring", "ulysses", "allgather", "exchange"),
    3: ("ring", "ulysses", "allgather", "exchange"),
    4: ("ring", "ulysses", "wallfacer", "double_ring", "exchange"),
}
OPTIONS = {"wallfacer": {"team_size": 2}, "double_ring": {"ranks_per_node": 2}}
BY_DAY = ("wan, time per token", "hunyuan", "flux, few tokens", "ltx 2")
"""Cases that run by day: every mechanism of the hooks."""


def alone(case, dtype):
    """The loss and gradients of one process."""
    with Float64Mode() if dtype == torch.float64 else nullcontext():
        model = model_of(case, dtype)
        return gradients(loss_of(model, inputs_of(case, dtype)), model)


def differences(rank, world_size, cells):
    """Tensors of each cell that are over the bound."""
    results = []
    for name, method, dtype in cells:
        case = CASES[name]
        with Float64Mode() if dtype == torch.float64 else nullcontext():
            model = model_of(case, dtype)
            shard(model, dist.group.WORLD, method=method, **OPTIONS.get(method, {}))
            loss = loss_of(model, inputs_of(case, dtype))
            mean = gradients(loss, model, dist.group.WORLD)
        wrong = errors(mean, alone(case, dtype), model, BOUNDS[dtype])
        if wrong and dtype == torch.float32:
            # A gradient may be a small difference of large numbers, in one process, too.
            exact = alone(case, torch.float64)
            ranks = errors(mean, exact, model, BOUNDS[dtype])
            process = errors(alone(case, dtype), exact, model, BOUNDS[dtype] / 4)
            wrong = {
                name: error for name, error in ranks.items() if error > 2 * process.get(name, 0)
            }
        results.append(wrong)
    return results


def wrong_cells(world_size, cells):
    """The cells with an error over its bound."""
    results = run_ranks(differences, world_size, cells)[0]
    return {cell: wrong for cell, wrong in zip(cells, results, strict=True) if wrong}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_models_equal_one_process(world_size):
    methods = METHODS[world_size]
    cells = []
    for index, name in enumerate(BY_DAY):
        cells.append((name, methods[(index + world_size) % len(methods)], torch.float64))
    cells.append(("wan", "ulysses", torch.float32))
    assert wrong_cells(world_size, cells) == {}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_method_of_every_model_equals_one_process(world_size):
    assert wrong_cells(world_size, list(product(CASES, METHODS[world_size], BOUNDS))) == {}

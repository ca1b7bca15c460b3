"""Models of transformers over gloo ranks against one process: loss and every gradient."""

from contextlib import nullcontext
from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist

from parallel.comparison import Float64Mode
from parallel.transformers import shard
from runtime.ranks import run_ranks
from tests.parallel.transformers.families import (
    FAMILIES,
    LENGTH,
    OTHERS,
    PACKED,
    averaged,
    errors,
    model_of,
    one_process,
    tokens,
)

METHODS = ("ring", "zigzag", "ulysses", "exchange")
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-6}


def cells_of(world_size):
    return list(product(FAMILIES, METHODS, (PACKED, (LENGTH,)), BOUNDS))


def differences(rank, world_size, cells):
    """Rank 0's errors of these cells.

    A tensor's against one process in its dtype, or, where less, in float64.
    """

    @cache
    def alone(family, documents, dtype):
        return [
            x.double() for x in one_process(family, world_size, *tokens(LENGTH), documents, dtype)
        ]

    rank_errors = []
    for family, method, documents, dtype in cells:
        with Float64Mode() if dtype == torch.float64 else nullcontext():
            model = model_of(family, world_size, dtype)
            cp = shard(model, dist.group.WORLD, method=method)
            batch = cp.batch(*tokens(LENGTH), documents=documents)
            mine = averaged(cp.loss(model(**batch.inputs), batch), model)
        if rank == 0:
            rank_errors.append(
                max(
                    map(
                        min,
                        *(
                            errors(mine, alone(family, documents, x))
                            for x in (dtype, torch.float64)
                        ),
                    )
                )
            )
    return rank_errors


def worst(world_size, cells):
    """The errors of the cells that are over their bounds."""
    all_errors = run_ranks(differences, world_size, cells)[0]
    return {cell: x for cell, x in zip(cells, all_errors, strict=True) if not x < BOUNDS[cell[3]]}


@pytest.mark.parametrize("world_size", [2, 3])
def test_models_equal_one_process(world_size):
    """Every family on one number of ranks, by one of the methods."""
    some = [
        (family, METHODS[i % 4])
        for i, family in enumerate(FAMILIES)
        if i % 3 // 2 == world_size - 2
    ]
    assert (
        worst(world_size, [(*each, PACKED, dtype) for each, dtype in product(some, BOUNDS)]) == {}
    )


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_method_of_every_model_equals_one_process(world_size):
    assert worst(world_size, cells_of(world_size)) == {}


@pytest.mark.slow
def test_other_families_equal_one_process():
    assert worst(2, list(product(OTHERS, METHODS, (PACKED, (LENGTH,)), [torch.float64]))) == {}

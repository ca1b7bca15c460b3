"""Models of transformers over gloo ranks against the same in one process: loss and every gradient."""

from contextlib import nullcontext
from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist

from parallel.transformers import shard
from runtime.ranks import run_ranks
from tests.parallel.transformers.families import FAMILIES, Wide, difference, gradients, model_of, one_process, tokens

LENGTH = 45
PACKED = (7, 1, 19, 4, 14)
METHODS = ("ring", "zigzag", "ulysses", "exchange")
BOUNDS = {torch.float64: 1e-10, torch.float32: 4e-6}


def cells_of(world_size):
    return list(product(FAMILIES, METHODS, (PACKED, (LENGTH,)), BOUNDS))


def sharded(family, method, documents, dtype, heads, group):
    """Loss and gradients over the ranks, averaged as DDP would."""
    model = model_of(family, heads, dtype)
    ids, labels = tokens(LENGTH)
    cp = shard(model, group, method=method)
    batch = cp.batch(ids, labels, documents=documents)
    loss = cp.loss(model(**batch.inputs), batch)
    found = gradients(loss, model)
    for x in found:
        dist.all_reduce(x, group=group)
    return [loss.detach(), *(x / dist.get_world_size() for x in found)]


def differences(rank, world_size, cells):
    """Rank 0's differences of these cells."""

    @cache
    def truth(family, documents):
        return one_process(family, world_size, *tokens(LENGTH), documents)

    found = []
    for family, method, documents, dtype in cells:
        with Wide() if dtype == torch.float64 else nullcontext():
            mine = sharded(family, method, documents, dtype, world_size, dist.group.WORLD)
            found.append(difference(mine, truth(family, documents)) if rank == 0 else 0)
    return found


def worst(world_size, cells):
    """The differences of the cells that are over their bounds."""
    found = run_ranks(differences, world_size, cells)[0]
    return {cell: x for cell, x in zip(cells, found, strict=True) if not x < BOUNDS[cell[3]]}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_models_equal_one_process(world_size):
    """A method for each family, which goes round with the ranks."""
    methods = {family: METHODS[(i + world_size) % len(METHODS)] for i, family in enumerate(FAMILIES)}
    cells = [(family, methods[family], PACKED, dtype) for family, dtype in product(FAMILIES, BOUNDS)]
    assert worst(world_size, cells) == {}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_method_of_every_model_equals_one_process(world_size):
    assert worst(world_size, cells_of(world_size)) == {}

"""Each matrix is computed once, whole, on every layout; what is sent is what the plan says."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from parallel import matrices
from parallel.data import local_shard
from parallel.matrices import WholeMatrices, balanced_rounds
from runtime.ranks import run_ranks

SHAPES = ((6, 4), (4, 6), (3, 8), (1, 7), (9, 9), (2, 2), (5, 3))
"""Fewer rows than ranks, rows that do not divide, and in a group of 8 fewer matrices than ranks."""


def whole(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SHAPES[number], generator=generator, dtype=torch.float64)


def computed(number, matrix):
    """Depends on all elements, and on which is where."""
    weights = torch.arange(matrix.numel(), dtype=matrix.dtype).view_as(matrix)
    return matrix.flip(0, 1) + (matrix * weights).sum() + number


def layouts(world_size):
    """Placements over meshes of all ranks, and one over a mesh that lacks the copies."""
    line = init_device_mesh("cpu", (world_size,))
    meshes = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "copies": (line, [Replicate()]),
    }
    if world_size > 2 and world_size % 2 == 0:
        square = init_device_mesh("cpu", (world_size // 2, 2))
        inner = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("outer", "inner"))
        meshes |= {
            "rows and columns": (square, [Shard(0), Shard(1)]),
            "rows twice": (square, [_StridedShard(0, split_factor=2), Shard(0)]),
            "hybrid": (square, [Replicate(), Shard(0)]),
            "kv heads": (square, [Shard(0), Replicate()]),
            "unseen copies": (inner["inner"], [Shard(1)]),
        }
    return meshes


def sharded(tensor, mesh, placements):
    if not any(isinstance(placement, _StridedShard) for placement in placements):
        return distribute_tensor(tensor, mesh, placements)
    # tp first, as in training: this rank's rows of its tp shard.
    rows = tensor.chunk(mesh.size(1), 0)
    local = tensor[:0]
    if mesh.get_local_rank(1) < len(rows):
        chunks = rows[mesh.get_local_rank(1)].chunk(mesh.size(0), 0)
        if mesh.get_local_rank(0) < len(chunks):
            local = chunks[mesh.get_local_rank(0)]
    return DTensor.from_local(
        local.contiguous(), mesh, placements, shape=tensor.shape, stride=tensor.stride()
    )


@contextmanager
def counted_traffic():
    """Count the elements that this rank sends to others."""
    sent = []
    exchange = dist.all_to_all_single

    def count(output, data, output_sizes, sizes, group=None):
        others = [size for rank, size in enumerate(sizes) if rank != dist.get_rank(group)]
        assert sum(others) == data.numel(), "nothing is sent to itself"
        sent.append(data.nbytes)
        return exchange(output, data, output_sizes, sizes, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", count)
        yield sent


def applied(parameters, plan):
    """Return this rank's shards of the results, and the numbers of what it computed."""
    shards = [local_shard(parameter)[0] for parameter in parameters]
    results = [torch.full_like(shard, float("nan")) for shard in shards]
    numbers = []

    def compute(number, matrix):
        numbers.append(number)
        return computed(number, matrix)

    def write(number, rows, values):
        assert results[number][rows].isnan().all(), "each row is written once"
        results[number][rows] = values

    plan.apply(lambda number, rows: shards[number][rows], compute, write)
    return results, numbers


def checked(rank, world_size, buffer):
    matrices.BUFFER = buffer
    outcome = {}
    for name, (mesh, placements) in layouts(world_size).items():
        parameters = [sharded(whole(n), mesh, placements) for n in range(len(SHAPES))]
        plan = WholeMatrices(parameters, dist.group.WORLD, dtype=torch.float64)
        with counted_traffic() as sent:
            results, numbers = applied(parameters, plan)
        for number, (result, parameter) in enumerate(zip(results, parameters, strict=True)):
            want = computed(number, whole(number))[local_shard(parameter)[1]]
            assert torch.equal(result, want), (name, number)
        assert sum(sent) == plan.sent_bytes, name
        assert max(sent, default=0) <= 8 * max(buffer, 9 * world_size), name
        outcome[name] = numbers, len(sent), plan.sent_bytes
    return outcome


@pytest.mark.parametrize("ranks", [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_each_matrix_is_computed_once_and_whole(ranks):
    by_rank = run_ranks(checked, ranks, 1 << 20)
    for name in by_rank[0]:
        numbers = [number for outcome in by_rank for number in outcome[name][0]]
        assert sorted(numbers) == list(range(len(SHAPES))), name
    # Replicated: what one rank computed goes to all others, and nothing is gathered.
    elements = sum(rows * columns for rows, columns in SHAPES)
    total = sum(outcome["copies"][2] for outcome in by_rank)
    assert total == 8 * (ranks - 1) * elements
    # Sharded: a matrix travels but for its owner's slice, there and back.
    total = sum(outcome["rows"][2] for outcome in by_rank)
    assert 0 < total < 2 * 8 * elements


def test_rounds_larger_than_the_buffer_take_several_collectives():
    small, large = (run_ranks(checked, 4, buffer) for buffer in (8, 1 << 20))
    for few, many in zip(large, small, strict=True):
        assert few["copies"][1] < many["copies"][1]
        assert few["copies"][2] == many["copies"][2]


def controls(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    parameters = [distribute_tensor(whole(n), mesh, [Shard(0)]) for n in range(len(SHAPES))]
    with pytest.raises(ValueError, match=rf"ranks \[{rank}\] shall .* but ranks \[0, 1\] share"):
        WholeMatrices(parameters)
    # A shard computed as if it were the matrix.
    shard, part = local_shard(parameters[0])
    return torch.equal(computed(0, shard), computed(0, whole(0))[part])


def test_a_shard_in_the_place_of_its_matrix_would_be_seen():
    assert run_ranks(controls, 2) == [False, False]


def test_one_process_sends_nothing():
    parameters = [whole(n) for n in range(len(SHAPES))]
    plan = WholeMatrices(parameters, dtype=torch.float64)
    results, numbers = applied(parameters, plan)
    assert (plan.sent_bytes, sorted(numbers)) == (0, list(range(len(SHAPES))))
    for number, result in enumerate(results):
        assert torch.equal(result, computed(number, whole(number)))
    assert WholeMatrices([]).sent_bytes == 0


def test_owners_have_about_equal_work():
    work = [4, 9, 4, 9, 4, 1]
    assert balanced_rounds(work, 3) == [{0: 1, 1: 3, 2: 0}, {2: 2, 0: 4, 1: 5}]
    assert balanced_rounds([1.0], 4) == [{0: 0}]
    assert balanced_rounds([], 4) == []

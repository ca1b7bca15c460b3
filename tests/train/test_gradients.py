"""The norm of a gradient over shards, and clipping by it."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

from bench.memory import events
from runtime.ranks import run_ranks
from train.gradients import NORM_CHUNK, clip_gradients, gradient_norm

SHAPES = [(3001, 1401), (7,), (2, 5), (1,)]
"""Large enough for float32 sums to be off.

Neither size divides by two, and one rank's share of the last is empty.
"""


def gradients():
    generator = torch.Generator().manual_seed(3)
    return [1e-3 + 1e-3 * torch.randn(shape, generator=generator) for shape in SHAPES]


def exact_norm():
    return math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients()))


def laid_out(mesh, *placements):
    """Return parameters with the gradients on a mesh."""
    parameters = []
    for gradient in gradients():
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
        parameter.grad = distribute_tensor(gradient, mesh, placements)
        parameters.append(parameter)
    return parameters


def norms_of_shards(rank, world_size):
    """The norm, the same with float32 sums, and the norm once it is clipped."""
    mesh = init_device_mesh("cpu", (world_size,))
    parameters = [
        *laid_out(mesh, Shard(0)),
        nn.Parameter(torch.zeros(3)),
    ]  # the last without a gradient
    norm = gradient_norm(parameters, mesh.get_group()).item()
    squares = (
        torch.stack([torch.linalg.vector_norm(p.grad.to_local()) for p in parameters[:-1]])
        .square()
        .sum()
    )
    torch.distributed.all_reduce(squares)
    clip_gradients(parameters, norm, 0.5)
    return norm, squares.sqrt().item(), gradient_norm(parameters, mesh.get_group()).item()


def test_norm_over_shards_is_the_whole_gradients_and_counts_what_several_ranks_hold_once():
    exact = exact_norm()
    for size in (1, 3):
        for norm, single, clipped in run_ranks(norms_of_shards, size):
            assert norm == pytest.approx(exact, rel=1e-12)
            assert clipped == pytest.approx(0.5, rel=1e-6)
            # Why it is summed in float64: in float32 the norm would depend on the number of ranks.
            assert abs(single - exact) / exact > 1e-6
    assert run_ranks(norm_over_two_dimensions, 4) == pytest.approx([exact_norm()] * 4, rel=1e-12)


def norm_over_two_dimensions(rank, world_size):
    """Two shards, each on two ranks."""
    return gradient_norm(laid_out(init_device_mesh("cpu", (2, 2)), Shard(0), Replicate())).item()


def largest_allocation(run):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    return max(allocated for _, allocated in events(recorded))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_copies_no_gradient_and_is_exact(dtype, monkeypatch):
    """A gradient of 4096 x 4096, 67 MB in float32, of which a copy in float64 is 134 MB."""
    gradient = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(4)).to(dtype)
    small = [torch.full((3, 5), 1e3), torch.zeros(0, 7), torch.randn(5, 7).T]
    exact = sum(
        torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in (gradient, *small)
    ).sqrt()
    parameters = [nn.Parameter(torch.empty_like(x)) for x in (gradient, *small)]
    for parameter, x in zip(parameters, (gradient, *small), strict=True):
        parameter.grad = x
    norms = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    assert largest_allocation(lambda: norms.append(gradient_norm(parameters))) <= 8 * NORM_CHUNK
    torch.testing.assert_close(norms[0], exact, rtol=1e-12, atol=0)
    # What it was made by before, and why not in float32: the control of both.
    assert (
        largest_allocation(lambda: torch.linalg.vector_norm(gradient, dtype=torch.float64))
        == 8 * gradient.numel()
    )
    alone = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    assert abs(torch._foreach_norm([gradient], 2, torch.float32)[0] / alone - 1) > 1e-4


@pytest.mark.parametrize(
    ("norm", "largest", "factor"),
    [
        (5.0, 1.0, 0.2),
        (5.0, 5.0, 1.0),
        (5.0, 6.0, 1.0),
        (5.0, 0.0, 1.0),
        (math.inf, 1.0, 1.0),
        (math.nan, 1.0, 1.0),
    ],
)
def test_clipping_scales_what_is_too_long_and_leaves_the_rest(norm, largest, factor):
    parameters = [
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.zeros(3)),
        nn.Parameter(torch.zeros(1)),
    ]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])
    clip_gradients(parameters, norm, largest)
    assert parameters[0].grad.tolist() == pytest.approx([3 * factor, 0.0])
    assert parameters[1].grad.tolist() == pytest.approx([0.0, 4 * factor, 0.0])
    assert parameters[2].grad is None

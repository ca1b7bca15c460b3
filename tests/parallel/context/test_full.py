"""Full attention, as diffusion transformers have it, by every method on contiguous blocks: exact, and even work."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context import context_parallel, make_plan
from runtime.ranks import run_ranks
from tests.parallel.context.test_executor import SHAPES, error, inputs, truth

METHODS: dict[int, list[tuple[str, dict]]] = {
    4: [
        ("ring", {}),
        ("allgather", {}),
        ("ulysses", {}),
        ("wallfacer", {}),
        ("wallfacer", {"team_size": 2}),
        ("double_ring", {"ranks_per_node": 2}),
        ("ring", {"ulysses_degree": 2}),
        ("allgather", {"ulysses_degree": 2}),
    ],
    8: [
        ("ring", {}),
        ("allgather", {}),
        ("ulysses", {}),
        ("wallfacer", {"team_size": 2}),
        ("double_ring", {"ranks_per_node": 4}),
        ("ring", {"ulysses_degree": 4}),
        ("allgather", {"ulysses_degree": 2}),
        ("wallfacer", {"team_size": 2, "ulysses_degree": 2}),
        ("double_ring", {"ranks_per_node": 4, "ulysses_degree": 2}),
    ],
}
FORCED = [("striped", {"layout": "striped"}), ("zigzag", {"layout": "zigzag"}), ("wallfacer", {"layout": "zigzag"})]
SHAPE = "gqa 8:2, odd length"


def attend(rank: int, world_size: int) -> list[list[Tensor]]:
    """[out, dq, dk, dv] of the whole sequence for each method."""
    found = []
    for method, options in [*METHODS[world_size], *FORCED]:
        cp = context_parallel(method, seq_len=SHAPES[SHAPE][2], group=dist.group.WORLD, causal=False, **options)
        assert cp.plan.geometry.layout.name == options.get("layout", "contiguous")
        *leaves, dout = (cp.shard(x, dim=1) for x in inputs(SHAPE, torch.float64))
        leaves = [x.requires_grad_() for x in leaves]
        out = cp.attend(*leaves)
        found.append([cp.unshard(x, dim=1) for x in (out, *torch.autograd.grad(out, leaves, dout))])
    return found


@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_method_is_exact(world_size: int) -> None:
    results = run_ranks(attend, world_size)[0]
    for case, got in zip([*METHODS[world_size], *FORCED], results, strict=True):
        assert max(error(got, truth(SHAPE, torch.float64, False))) < 1e-13, case


@pytest.mark.parametrize("size", METHODS)
def test_every_rank_has_the_same_work_in_any_layout(size: int) -> None:
    """Why striped and zigzag bring nothing here."""
    for method, options in [*METHODS[size], *FORCED]:
        plan = make_plan(method, seq_len=size * 16, size=size, causal=False, **options)
        work = {sum(step.pairs for step in plan.rounds(rank)) for rank in range(size)}
        assert len(work) == 1, (method, options)

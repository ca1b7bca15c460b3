"""Teams, heads, nodes and their products over real gloo ranks: against float64, and bytes against the plan."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kernels import reference
from parallel.context import Traffic, context_parallel
from runtime.ranks import run_ranks
from tests.parallel.context.test_executor import BASIC, BATCH, HEAD_DIM, SHAPES, error, inputs, one_process_sdpa, truth

COMPOSED: dict[int, list[tuple[str, dict]]] = {
    4: [
        ("wallfacer", {}),
        ("wallfacer", {"team_size": 2}),
        ("ulysses", {}),
        ("double_ring", {"ranks_per_node": 2}),
        ("ring", {"ulysses_degree": 2}),
        ("zigzag", {"ulysses_degree": 4}),
        ("allgather", {"ulysses_degree": 2}),
        ("allgather", {"layout": "striped"}),
    ],
    8: [
        ("wallfacer", {"team_size": 2, "layout": "striped"}),
        ("wallfacer", {"team_size": 2, "placement": "p2p_intra"}),
        ("wallfacer", {"team_size": 2, "ulysses_degree": 2}),
        ("striped", {"ulysses_degree": 4}),
        ("double_ring", {"ranks_per_node": 4}),
        ("double_ring", {"ranks_per_node": 4, "ulysses_degree": 2, "layout": "striped"}),
    ],
    9: [("wallfacer", {}), ("wallfacer", {"team_size": 3})],
}


def attend_and_count(
    rank: int, world_size: int, cases: list[tuple[str, dict, torch.dtype, bool]]
) -> list[tuple[list[Tensor], bool]]:
    """[out, dq, dk, dv] of the whole sequence, and whether the bytes sent are those of the plan."""
    shape = "gqa 8:2, odd length"
    heads, kv_heads, seq_len = SHAPES[shape]
    results = []
    for method, options, dtype, causal in cases:
        cp = context_parallel(method, seq_len=seq_len, group=dist.group.WORLD, causal=causal, **options)
        *leaves, dout = (cp.shard(x.to(dtype), dim=1) for x in inputs(shape, dtype))
        leaves = [x.requires_grad_() for x in leaves]
        out = cp.attend(*leaves)
        sent, cp.transport.traffic = cp.transport.traffic, Traffic()
        gradients = torch.autograd.grad(out, leaves, dout)
        size = out.element_size()
        cost = cp.plan.cost(rank, batch=BATCH, heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM, element_size=size)
        as_planned = (sent, cp.transport.traffic) == (cost.forward, cost.backward)
        results.append(([cp.unshard(x, dim=1) for x in (out, *gradients)], as_planned))
    return results


@pytest.mark.parametrize("world_size", [4, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (8, 9))])
def test_teams_heads_and_nodes_are_exact_and_send_what_the_plan_says(world_size: int) -> None:
    cases = [
        (method, {**options, "backward": moves}, dtype, causal)
        for method, options in COMPOSED[world_size]
        for moves, dtype, causal in (
            ("kv", torch.float32, True),
            ("queries", torch.float32, False),
            ("queries", torch.bfloat16, True),
            ("kv", torch.float64, False),
            ("queries", torch.float64, True),
        )
    ]
    results = run_ranks(attend_and_count, world_size, cases)
    for index, case in enumerate(cases):
        assert all(result[index][1] for result in results), case
        expected = ("gqa 8:2, odd length", *case[2:])
        want = truth(*expected)
        exact = case[2] == torch.float64
        limits = [1e-13] * 4 if exact else [1.2 * limit for limit in error(one_process_sdpa(*expected), want)]
        for name, measured, limit in zip(
            ("out", "dq", "dk", "dv"), error(results[0][index][0], want), limits, strict=True
        ):
            assert measured <= limit, f"{case}: {name} has {measured:.3g}, the limit is {limit:.3g}"


def attend_as_rings(rank: int, world_size: int) -> list[list[Tensor]]:
    """Methods that come down to one ring."""
    found = []
    rings = [("zigzag", {}), ("wallfacer", {}), ("double_ring", {}), ("double_ring", {"ranks_per_node": 1})]
    for method, options in rings:
        cp = context_parallel(method, seq_len=251, group=dist.group.WORLD, backward="queries", **options)
        *leaves, dout = (cp.shard(x.float(), dim=1) for x in inputs("gqa 8:2, odd length", torch.float32))
        leaves = [x.requires_grad_() for x in leaves]
        out = cp.attend(*leaves)
        found.append([cp.unshard(x, dim=1) for x in (out, *torch.autograd.grad(out, leaves, dout))])
    return found


def test_one_member_or_one_node_is_the_plain_ring_to_the_bit() -> None:
    for zigzag, *others in run_ranks(attend_as_rings, 4):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(zigzag, other, strict=True))


def attend_side_by_side(rank: int, world_size: int) -> list[list[Tensor]]:
    """Two sequences at once, each on every other rank of eight, with groups of their own within."""
    group = [dist.new_group(list(range(first, 8, 2))) for first in (0, 1)][rank % 2]
    found = []
    for method, options in COMPOSED[4]:
        cp = context_parallel(method, seq_len=251, group=group, **options)
        q, k, v, _ = (cp.shard(x, dim=1) for x in inputs("gqa 8:2, odd length", torch.float64))
        found.append([cp.unshard(cp.attend(q + rank % 2, k, v), dim=1)])
    return found


def test_the_groups_of_two_sequences_do_not_meet() -> None:
    q, k, v, _ = inputs("gqa 8:2, odd length", torch.float64)
    want = [[reference.attention(q + other, k, v, causal=True)[0]] for other in (0, 1)]
    for rank, results in enumerate(run_ranks(attend_side_by_side, 8)):
        assert max(max(error(got, want[rank % 2])) for got in results) < 1e-13


def attend_broken(rank: int, world_size: int, broken: str) -> list[Tensor]:
    """WallFacer with KV left where it was gathered, or partial results added without their weights."""
    from parallel.context import executor, transport

    if broken == "placement":
        shift = transport.Transport.send_recv
        transport.Transport.send_recv = lambda self, tensors, transfer, *rest: (
            (lambda: tensors) if transfer.due == 1 else shift(self, tensors, transfer, *rest)
        )
    elif broken == "weights":
        executor.merged = lambda out, lse: (out.mean(0), torch.logsumexp(lse, 0))
    ((got, _),) = attend_and_count(rank, world_size, [("wallfacer", {"team_size": 2}, torch.float64, True)])
    return got


@pytest.mark.parametrize("broken", ["nothing", "placement", "weights"])
def test_kv_left_where_it_was_and_partial_results_without_weights_are_noticed(broken: str) -> None:
    want = truth("gqa 8:2, odd length", torch.float64, True)
    found = max(error(run_ranks(attend_broken, 4, broken)[0], want))
    assert found < 1e-13 if broken == "nothing" else found > 1e-2


def exchange_heads(rank: int, world_size: int) -> None:
    cp = context_parallel("ulysses", seq_len=16, group=dist.group.WORLD)
    for kv_heads in (1, 2):
        x = torch.randn(1, 8, kv_heads, 8, dtype=torch.float64, requires_grad=True)
        arguments = (x, 2, cp._heads.handle)
        torch.library.opcheck(torch.ops.longmesh.tokens_to_heads.default, arguments)
    x = torch.randn(1, 16, 1, 8, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.longmesh.heads_to_tokens.default, (x, 2, 2, cp._heads.handle))


def test_the_exchange_of_heads_is_an_operator_that_autograd_and_tracing_accept() -> None:
    run_ranks(exchange_heads, 2)


def attend_with_documents(rank: int, world_size: int) -> list[list[Tensor]]:
    results = []
    documents = (0, 50, 51, 130, 251)
    for method, options in [*((name, {}) for name in BASIC), *COMPOSED[world_size]]:
        cp = context_parallel(method, seq_len=251, group=dist.group.WORLD, documents=documents, **options)
        out = cp.attend(*(cp.shard(x, dim=1) for x in inputs("gqa 8:2, odd length", torch.float64)[:3]))
        results.append([cp.unshard(out, dim=1)])
    return results


def test_packed_documents_attend_to_themselves_alone() -> None:
    q, k, v, _ = inputs("gqa 8:2, odd length", torch.float64)
    bounds = ((0, 50), (50, 51), (51, 130), (130, 251))
    want = torch.cat([reference.attention(q[:, a:b], k[:, a:b], v[:, a:b], causal=True)[0] for a, b in bounds], dim=1)
    for got in run_ranks(attend_with_documents, 4)[0]:
        assert max(error(got, [want])) < 1e-14

"""Teams, heads, nodes and their products over real gloo ranks: against float64, and bytes against the plan."""

import pytest
import torch
import torch.distributed as dist

from kernels import reference
from parallel.context import context_parallel
from runtime.ranks import run_ranks
from tests.parallel.context.attended import PLAIN, Ranks, attended, check, error, inputs, truth

COMPOSED = {
    4: [
        ("wallfacer", {}),
        ("wallfacer", {"team_size": 2}),
        ("wallfacer", {"layout": "zigzag"}),
        ("ulysses", {}),
        ("double_ring", {"ranks_per_node": 2}),
        ("ring", {"ulysses_degree": 2}),
        ("zigzag", {"ulysses_degree": 4}),
        ("allgather", {"ulysses_degree": 2}),
        ("allgather", {"layout": "striped"}),
    ],
    8: [
        ("ulysses", {}),
        ("wallfacer", {"team_size": 2, "layout": "striped"}),
        ("wallfacer", {"team_size": 2, "placement": "p2p_intra"}),
        ("wallfacer", {"team_size": 2, "ulysses_degree": 2}),
        ("striped", {"ulysses_degree": 4}),
        ("allgather", {"ulysses_degree": 2}),
        ("double_ring", {"ranks_per_node": 4}),
        ("double_ring", {"ranks_per_node": 4, "ulysses_degree": 2, "layout": "striped"}),
    ],
    9: [("wallfacer", {}), ("wallfacer", {"team_size": 3})],
}


@pytest.mark.parametrize("world_size", [4, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (8, 9))])
def test_teams_heads_and_nodes_are_exact_and_send_what_the_plan_says(world_size):
    full, packed = PLAIN._replace(causal=False), PLAIN._replace(documents=(0, 50, 51, 130, 251))
    cases = [
        (method, {**options, "backward": moves}, masked, dtype)
        for method, options in COMPOSED[world_size]
        for moves, dtype, masked in (
            ("kv", torch.float32, PLAIN),
            ("queries", torch.float32, full),
            ("queries", torch.bfloat16, PLAIN),
            ("kv", torch.float64, full),
            ("queries", torch.float64, PLAIN),
            ("kv", torch.float64, packed),
        )
    ]
    check(world_size, cases, exact=1e-14)


def attend_as_rings(rank, world_size):
    """Methods that come down to one ring."""
    rings = [("zigzag", {}), ("wallfacer", {}), ("double_ring", {}), ("double_ring", {"ranks_per_node": 1})]
    given = ((method, {**options, "backward": "queries"}) for method, options in rings)
    return [attended(Ranks(), *method, PLAIN, torch.float32)[0] for method in given]


def test_one_member_or_one_node_is_the_plain_ring_to_the_bit():
    for zigzag, *others in run_ranks(attend_as_rings, 4):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(zigzag, other, strict=True))


def attend_side_by_side(rank, world_size):
    """Two sequences at once, each on every other rank of eight, with groups of their own within."""
    group = [dist.new_group(list(range(first, 8, 2))) for first in (0, 1)][rank % 2]
    found = []
    for method, options in COMPOSED[4]:
        cp = context_parallel(method, seq_len=PLAIN.length, group=group, **options)
        q, k, v, _ = (cp.shard(x, dim=1) for x in inputs(PLAIN, torch.float64))
        found.append([cp.unshard(cp.attend(q + rank % 2, k, v), dim=1)])
    return found


def test_the_groups_of_two_sequences_do_not_meet():
    q, k, v, _ = inputs(PLAIN, torch.float64)
    want = [[reference.attention(q + other, k, v, causal=True)[0]] for other in (0, 1)]
    for rank, results in enumerate(run_ranks(attend_side_by_side, 8)):
        assert max(max(error(got, want[rank % 2])) for got in results) < 1e-13


def attend_broken(rank, world_size, broken):
    """WallFacer with KV left where it was gathered, or partial results added without their weights."""
    from parallel.context import executor, transport

    if broken == "placement":
        shift = transport.Transport.send_recv
        transport.Transport.send_recv = lambda self, tensors, transfer, *rest: (
            (lambda: tensors) if transfer.due == 1 else shift(self, tensors, transfer, *rest)
        )
    elif broken == "weights":
        executor.merged = lambda out, lse: (out.mean(0), torch.logsumexp(lse, 0))
    return attended(Ranks(), "wallfacer", {"team_size": 2}, PLAIN, torch.float64)[0]


@pytest.mark.parametrize("broken", ["nothing", "placement", "weights"])
def test_kv_left_where_it_was_and_partial_results_without_weights_are_noticed(broken):
    found = max(error(run_ranks(attend_broken, 4, broken)[0], truth(PLAIN, torch.float64)))
    assert found < 1e-13 if broken == "nothing" else found > 1e-2


def exchange_heads(rank, world_size):
    cp = context_parallel("ulysses", seq_len=16, group=dist.group.WORLD)
    for kv_heads in (1, 2):
        x = torch.randn(1, 8, kv_heads, 8, dtype=torch.float64, requires_grad=True)
        arguments = (x, 2, cp._heads.handle)
        torch.library.opcheck(torch.ops.longmesh.tokens_to_heads.default, arguments)
    x = torch.randn(1, 16, 1, 8, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.longmesh.heads_to_tokens.default, (x, 2, 2, cp._heads.handle))


def test_the_exchange_of_heads_is_an_operator_that_autograd_and_tracing_accept():
    run_ranks(exchange_heads, 2)

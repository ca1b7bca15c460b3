"""Heads exchanged in stages on real gloo ranks.

The attention without stages has the same bits; bytes and memory are counted.
"""

from functools import partial
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from parallel.context import Traffic, context_parallel, staged
from planner.recorder import Recorder
from planner.rehearsal import fake_process_group
from runtime.ranks import run_ranks
from tests.parallel.context.attended import error

BATCH, WIDTH = 2, 4
STAGES = {  # method, options, heads, KV heads, stages
    2: [
        ("ulysses", {}, 8, 8, 2),
        ("ulysses", {}, 8, 8, 4),
        ("ulysses", {"window": (31, 0)}, 8, 4, 2),
    ],
    4: [
        ("ulysses", {}, 8, 2, 2),  # fewer KV heads than ranks
        ("ulysses", {"causal": False}, 24, 8, 6),
        ("zigzag", {"ulysses_degree": 2}, 8, 8, 4),
        ("allgather", {"ulysses_degree": 2}, 16, 4, 8),
        ("exchange", {"ulysses_degree": 2, "documents": (0, 96, 128, 256)}, 8, 4, 2),
        ("zigzag", {"ulysses_degree": 2, "documents": (0, 96, 128, 256)}, 8, 2, 4),
    ],
    8: [
        ("wallfacer", {"ulysses_degree": 2, "team_size": 2}, 8, 8, 4),
        ("double_ring", {"ulysses_degree": 2, "ranks_per_node": 4}, 16, 8, 4),
    ],
}


def in_stages(rank, world_size, dtype, *, wrong=False):
    """[out, dq, dk, dv, dsinks] of each case, without stages and in stages.

    What is sent is what the plan says.
    """
    if wrong:  # every stage attends with its rank's first heads
        staged.HeadSubset._view = lambda self, x: (
            x.unflatten(2, self.split).select(5, 0).select(3, 0)
        )
    results = []
    for method, options, count, kv_count, stages in STAGES[world_size]:
        generator = torch.Generator().manual_seed(5)
        counts = (count, kv_count, kv_count, count)
        whole = [
            torch.randn(BATCH, 256, n, 16, generator=generator, dtype=torch.float64).to(dtype)
            for n in counts
        ]
        sinks = torch.randn(count, generator=generator)
        results.append([])
        for chunks in (1, stages):
            options = options | {"ulysses_head_chunks": chunks}
            cp = context_parallel(method, seq_len=256, group=dist.group.WORLD, **options)
            q, k, v, dout = (cp.shard(x, 1) for x in whole)
            # A sink's logarithm of a single head is another one in its last bit: no sinks to
            # compare with there.
            sinks_of = sinks if count > cp.plan.geometry.ulysses_degree * stages else None
            leaves = [
                x.detach().requires_grad_()
                for x in (q, k, v, sinks)
                if x is not sinks or sinks_of is not None
            ]
            out = cp.attend(*leaves[:3], sinks=None if sinks_of is None else leaves[3])
            sent, cp.transport.traffic = cp.transport.traffic, Traffic()
            gradients = list(torch.autograd.grad(out, leaves, dout))
            sizes = {"batch": BATCH, "heads": count, "kv_heads": kv_count, "head_dim": 16}
            cost = cp.plan.cost(rank, **sizes, element_size=dtype.itemsize)
            assert (sent, cp.transport.traffic) == (cost.forward, cost.backward), (method, options)
            if sinks_of is not None:
                dist.all_reduce(gradients[3])
            results[-1].append(
                [cp.unshard(x, 1) for x in (out.detach(), *gradients[:3])] + gradients[3:]
            )
    return results


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("world_size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_stages_change_no_bit(world_size, dtype):
    """If the query heads of a KV head are in several stages, sums over them have another order.

    The sums are dk, dv, in a ring dq.

    All tiles here have multiples of 16 rows: of others a CPU merges the last rows, and which these
    are depends on the heads, by instructions that round otherwise.
    """
    for case, (want, got) in zip(
        STAGES[world_size], run_ranks(in_stages, world_size, dtype)[0], strict=True
    ):
        _, options, _, kv_count, stages = case
        ranks = options.get("ulysses_degree", world_size)
        same = 4 if max(1, kv_count // ranks) % stages == 0 else 2 if ranks == world_size else 1
        assert all(torch.equal(a, b) for a, b in zip(got[:same], want[:same], strict=True)), case
        limit = 1e-6 if dtype == torch.float32 else 1e-3
        assert all(x <= limit for x in error(got[same:], [x.double() for x in want[same:]])), case


def test_stages_of_wrong_heads_would_be_seen():
    wrong = run_ranks(partial(in_stages, wrong=True), 2, torch.float32)[0]
    assert not any(torch.equal(got[0], want[0]) for want, got in wrong)


def counted(stages, kv_heads):
    """Bytes beyond q, k and v of a rank of 8 with 64 query heads.

    A forward's peak, what it keeps, a backward's peak.

    In units of a rank's tokens of one head in bfloat16.
    """
    with fake_process_group(0, 8, 8):
        cp = context_parallel(
            "ulysses", seq_len=1024, group=dist.group.WORLD, ulysses_head_chunks=stages
        )
        recorder = Recorder(0, 8)
        with recorder.recording():
            leaves = [
                torch.empty(1, 128, n, WIDTH, dtype=torch.bfloat16, requires_grad=True)
                for n in (64, kv_heads, kv_heads)
            ]
            dout, begun = torch.empty_like(leaves[0]), len(recorder.events)
            out = cp.attend(*leaves)
            turned = len(recorder.events)
            _gradients = torch.autograd.grad(out, leaves, dout)
            live = [0, *accumulate(change for _, change in recorder.events)]
    unit = 128 * WIDTH * 2
    peaks = max(live[begun : turned + 1]), live[turned], max(live[turned:])
    return tuple((peak - live[begun]) // unit for peak in peaks)


@pytest.mark.parametrize("kv_heads", [64, 8])
def test_exchanged_heads_take_a_stages_memory(kv_heads):
    """UPipe's formula: of 64 heads on 8 ranks in 8 stages, 87.5 % less.

    What is not exchanged stays as it is.

    With 8 KV heads all stages share the one that a rank has, exchanged once.
    """
    kept_own = 64 + 64 * 4 // (2 * WIDTH)  # the local out, and lse in float32
    whole, num_kept, _ = counted(1, kv_heads)
    assert num_kept == 64 + kept_own + 2 * kv_heads + 64  # with q, k, v and out exchanged
    counts_by_stages = {stages: counted(stages, kv_heads) for stages in (2, 4, 8)}
    for stages, (peak, num_kept, backward) in counts_by_stages.items():
        queries, keys = 64 // stages, max(8, kv_heads // stages)
        assert num_kept == kept_own
        # q, k, v, out and lse; copies under way
        assert kept_own + 3.5 * queries + 2 * keys <= peak <= kept_own + 4 * queries + 2 * keys
        gradients = 64 + 2 * kv_heads + 32  # with that of lse
        assert (
            backward <= kept_own + gradients + 640 // stages + 4 * 8
        )  # 10 of each head in a stage, and shared dk, dv
    assert 4 * 8 + 2 * 8 == (4 * 64 + 2 * 64) * (1 - 0.875)
    assert whole > counts_by_stages[2][0]

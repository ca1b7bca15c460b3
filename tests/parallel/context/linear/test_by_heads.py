"""The gated delta rule over exchanged heads on real gloo ranks against the recurrence in one process, in float64."""

import pytest
import torch
import torch.distributed as dist

from kernels.delta.convolution import causal_convolution
from kernels.delta.rule import delta_rule
from parallel.context import ContextError, Traffic, context_parallel
from parallel.context.linear import attention as by_heads
from runtime.ranks import run_ranks
from tests.parallel.context.linear import test_delta

DOCUMENTS = (0, 3, 40, 41, 131, 251)
CASES = [(251, None, 1), (251, DOCUMENTS, 2), (251, DOCUMENTS, None), (256, (0, 64, 128, 256), 1), (5, (0, 1, 5), 2)]
"""Length, documents, and value heads of a key head; None is a gate per channel."""
ULYSSES = ("ulysses", {"delta_rule_schedule": "ulysses"})


def on_ranks(rank, world_size, cases, fault=None):
    test_delta.KEYS = 12  # heads for 2, 3 and 4 ranks
    return test_delta.attend_on_ranks(rank, world_size, [(ULYSSES, *case, "ulysses") for case in cases], fault)


def truth(monkeypatch, length, documents, shared):
    monkeypatch.setattr(test_delta, "KEYS", 12)
    attend = lambda *x: delta_rule(*x, documents=documents, backend="reference")[0]  # noqa: E731
    return test_delta.with_gradients(attend, test_delta.inputs(length, shared))


def formula(world_size, length, shared):
    """Bytes to each other rank, forward and backward: q, k, v, out, gates and beta of its share of the heads."""
    tokens, heads = -(-length // world_size), 12 * (shared or 1)
    gates = 1 if shared else test_delta.WIDTH
    row = 2 * 12 * test_delta.WIDTH + heads * (2 * test_delta.VALUES + gates + 1)
    return 2 * test_delta.BATCH * tokens * row // world_size * 8


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exchanged_heads_are_exact_and_bytes_are_counted(monkeypatch, world_size):
    results = run_ranks(on_ranks, world_size, CASES)
    for index, case in enumerate(CASES):
        found = test_delta.errors(results[0][index][0], truth(monkeypatch, *case))
        assert max(found.values()) <= 1e-12, (case, found)
        length, _, shared = case
        for rank, result in enumerate(results):
            want = Traffic()
            for peer in set(range(world_size)) - {rank}:
                want.collective[peer] = formula(world_size, length, shared)
            assert result[index][1] == want


def documents_joined():
    """Documents that are not told apart."""
    by_heads.gates_with_resets = lambda gates, documents: gates


def test_joined_documents_show(monkeypatch):
    got, _ = run_ranks(on_ranks, 2, CASES[1:2], documents_joined)[0][0]
    assert max(test_delta.errors(got, truth(monkeypatch, *CASES[1])).values()) > 1e-3


def layer_on_ranks(rank, world_size):
    """A convolution before the rule, compiled whole: bytes of the halo, and out."""
    test_delta.KEYS = 12
    method, options = ULYSSES
    cp = context_parallel(method, seq_len=64, group=dist.group.WORLD, documents=(0, 40, 64), **options)
    q, *others, _ = (cp.shard(x, 1) for x in test_delta.inputs(64, 1))
    weight = torch.linspace(-1, 1, 12 * test_delta.WIDTH * 4, dtype=torch.float64).view(-1, 4)

    def layer(q):
        return cp.attend_delta(cp.convolve(q.flatten(2), weight).view_as(q), *others)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    plain = layer(q)
    sent = cp.transport.traffic.p2p.total()
    return cp.unshard(plain, 1), torch.equal(compiled(q), plain), sent


def test_the_convolution_keeps_its_halo_and_a_layer_compiles_whole(monkeypatch):
    results = run_ranks(layer_on_ranks, 2)
    monkeypatch.setattr(test_delta, "KEYS", 12)
    q, *others, _ = test_delta.inputs(64, 1)
    weight = torch.linspace(-1, 1, 12 * test_delta.WIDTH * 4, dtype=torch.float64).view(-1, 4)
    q = causal_convolution(q.flatten(2), weight, documents=(0, 40, 64)).view_as(q)
    want = delta_rule(q, *others, documents=(0, 40, 64), backend="reference")[0]
    torch.testing.assert_close(results[0][0], want, rtol=0, atol=1e-12 * want.abs().max().item())
    assert all(same for _, same, _ in results)
    assert [sent for *_, sent in results] == [test_delta.BATCH * 3 * 12 * test_delta.WIDTH * 8, 0]


def refused(rank, world_size):
    method, options = ULYSSES
    cp = context_parallel(method, seq_len=16, group=dist.group.WORLD, **options)
    tensors = [cp.shard(x, 1) for x in test_delta.inputs(16, 1)[:5]]
    with pytest.raises(ContextError, match=r"3 ranks cannot split the 2 of 2 value heads; use a number of ranks"):
        cp.attend_delta(*tensors)
    with pytest.raises(ContextError, match=r"context_parallel_method zigzag.*needs method ulysses"):
        context_parallel("zigzag", seq_len=16, group=dist.group.WORLD, **options)


def test_heads_or_methods_that_do_not_fit_are_named():
    run_ranks(refused, 3)

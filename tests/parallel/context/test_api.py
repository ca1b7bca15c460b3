"""k and v prefetched: their gather is under way before q is projected; nothing else changes."""

import pytest
import torch
import torch.distributed as dist

from model.decoder import Decoder
from model.parts.attention import PrefetchingAttend
from parallel import recompute
from parallel.context import ContextError, Traffic, context_parallel
from parallel.recompute import RecomputeConfig, recompute_layers
from runtime.ranks import run_ranks
from tests.model.models import model_config

LENGTH, BATCH = 96, 2
MODEL = model_config(
    num_layers=2, hidden_size=64, num_attention_heads=8, num_query_groups=4, vocab_size=37
)
GATHERING = {
    4: [("wallfacer", {"team_size": 2}), ("allgather", {}), ("allgather", {"ulysses_degree": 2})],
    8: [("wallfacer", {"team_size": 2}), ("wallfacer", {"team_size": 2, "ulysses_degree": 2})],
}
NOT_GATHERING = [("zigzag", {}), ("wallfacer", {}), ("ulysses", {})]
STAGED = [("allgather", {"ulysses_degree": 2, "ulysses_head_chunks": 2})]
AGAIN = {"none": 0, "full": 1, "selective": 1, "attention_boundary": 0}
"""The times that the backward gathers and attends again."""


def late(cp):
    """The same attention for a model that cannot prefetch."""
    return lambda q, k, v: cp.attend(q, k, v)


def early(cp):
    """The attention for a model that prefetches."""
    return cp.attend


def llama(attend, granularity="none"):
    model = Decoder(MODEL, attend).double()
    model.init_weights(3)
    recompute_layers(model.layers, RecomputeConfig(recompute_granularity=granularity))
    return model


def micro_batch(cp, index):
    tokens = torch.randint(37, (BATCH, LENGTH), generator=torch.Generator().manual_seed(index))
    return cp.shard(tokens, dim=1)


def gradients(model, cp, micro_batches=1):
    """Loss and gradients.

    All micro-batches go forward before the first goes back, as a pipeline may have it.
    """
    losses = [
        model(micro_batch(cp, i), positions=cp.positions).square().sum()
        for i in range(micro_batches)
    ]
    for loss in losses:
        loss.backward()
    return [
        torch.stack(losses).detach(),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]


def events(cp, model):
    """The projections of a forward, and the gathers that it posts, by their number of tensors."""
    log = []
    for layer in model.layers:
        for name in ("wq", "wk", "wv"):
            projection = getattr(layer.attention, name)
            projection.register_forward_pre_hook(lambda *_, name=name: log.append(name))
    gather = cp.transport.gather

    def noting(tensors, ranks):
        log.append(f"gather {len(tensors)}")
        return gather(tensors, ranks)

    cp.transport.gather = noting
    with torch.no_grad():
        model(micro_batch(cp, 0), positions=cp.positions)
    return log


def in_order(rank, world_size):
    """Events of each case by an attention that prefetches, and by the same one that cannot."""
    results = []
    for method, options in [*GATHERING[world_size], *NOT_GATHERING]:
        contexts = [
            context_parallel(method, seq_len=LENGTH, group=dist.group.WORLD, **options)
            for _ in range(2)
        ]
        assert isinstance(contexts[0].attend, PrefetchingAttend)
        results.append(
            [
                events(cp, llama(attend(cp)))
                for cp, attend in zip(contexts, (early, late), strict=True)
            ]
        )
    return results


def test_keys_and_values_are_on_their_way_before_q_is_projected_if_they_are_gathered():
    at_once = ["wk", "wv", "wq", "gather 2", "gather 1"] * MODEL.num_layers
    prefetched = ["wk", "wv", "gather 2", "wq", "gather 1"] * MODEL.num_layers
    for results in run_ranks(in_order, 4):
        assert results == [[prefetched, at_once]] * len(GATHERING[4]) + [[at_once, at_once]] * len(
            NOT_GATHERING
        )


def steps(rank, world_size, cases):
    """Against an attention of the same plan that never prefetches, to the bit.

    It is also compared with one process in float64.
    """
    ring = context_parallel("ring", seq_len=LENGTH)
    want = gradients(llama(ring.attend), ring, 2)
    heads = {
        "heads": MODEL.num_attention_heads,
        "kv_heads": MODEL.query_groups,
        "head_dim": MODEL.head_dim,
    }
    for method, options in cases:
        for granularity, again in AGAIN.items():
            if granularity in ("full", "selective") and method != "wallfacer":
                continue  # what the backward gathers again is the same for all
            cp = context_parallel(method, seq_len=LENGTH, group=dist.group.WORLD, **options)
            got = gradients(llama(cp.attend, granularity), cp, 2)
            sent, cp.transport.traffic = cp.transport.traffic, Traffic()
            plain = gradients(llama(late(cp), granularity), cp, 2)
            case = f"{method}, {options}, {granularity}"
            assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True)), case
            assert (sent, cp._executor._prefetched) == (cp.transport.traffic, None), case
            # With it attention_boundary repeats a part, the heads exchanged there, unless they are
            # in stages.
            if cp.plan.geometry.ulysses_degree == 1 or (method, options) in STAGED:
                cost = cp.plan.cost(rank, batch=BATCH, element_size=8, **heads)
                attentions = 2 * MODEL.num_layers
                assert sent.total == attentions * (
                    (1 + again) * cost.forward.total + cost.backward.total
                ), case
            for x in got:
                dist.all_reduce(x)
            assert all(
                (a - b).norm() <= 1e-12 * b.norm() for a, b in zip(got, want, strict=True)
            ), case


@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_no_policy_of_recomputation_changes_or_gathers_more(world_size):
    run_ranks(steps, world_size, GATHERING[world_size] + STAGED * (world_size > 4))


def misused(rank, world_size):
    cp = context_parallel("wallfacer", seq_len=LENGTH, group=dist.group.WORLD, team_size=2)
    q = torch.randn(1, cp.plan.local_len, 4, 8)
    want = cp.attend(q, q, q)
    for again in (lambda: cp.attend.prefetch_kv(q, q), lambda: cp.attend(q, q, q)):
        cp.attend.prefetch_kv(q, q)
        with pytest.raises(ContextError, match="takes prefetch None of k and v, but"):
            again()
    attention = cp.attend.prefetch_kv(q, q)
    assert torch.equal(attention(q), want)
    with pytest.raises(ContextError, match="but prefetch None is pending"):
        attention(q)
    with pytest.raises(ContextError, match="24 local positions"):
        cp.attend.prefetch_kv(q, q[:, :-1])
    assert torch.equal(cp.attend(q, q, q), want)
    # attention_boundary without the operator that prefetches: the second layer's, in the backward
    recompute.ATTENTION -= {"longmesh::prefetch_kv"}
    with pytest.raises(ContextError, match="takes prefetch None of k and v, but"):
        gradients(llama(cp.attend, "attention_boundary"), cp)


def test_what_is_prefetched_is_taken_once_and_next_and_a_handle_that_is_not_kept_is_noticed():
    run_ranks(misused, 4)


def traced(rank, world_size):
    cp = context_parallel("allgather", seq_len=16, group=dist.group.WORLD)
    k = torch.randn(1, 8, 2, 8)
    tests = ("test_schema", "test_autograd_registration")
    torch.library.opcheck(
        torch.ops.longmesh.prefetch_kv.default, (k, k, cp._executor.handle), test_utils=tests
    )


def test_the_prefetch_is_an_operator():
    run_ranks(traced, 2)

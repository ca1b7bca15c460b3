"""Softmax attention of every method on real gloo ranks.

It is compared with float64 and one process, and bytes with the plan.
"""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from kernels import reference
from kernels.attention import CAUSAL, FULL
from parallel.context import METHODS, ContextError, context_parallel, executor, tiles
from parallel.context.circulation import NeededRows
from parallel.context.transport import HeadExchange, Transport
from runtime.ranks import run_ranks
from tests.compositions import SLOW_RANKS, compositions
from tests.parallel.context.attended import (
    CU_SEQLENS,
    PLAIN,
    Masked,
    Ranks,
    attended,
    check,
    error,
    inputs,
    truth,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
MOVES = ("kv", "queries")
PACKED = Masked((0, 50, 51, 130, 251), length=251)
EVERYTHING = Masked(CU_SEQLENS, (9, 0), sinks=True)
MASKS = (
    PLAIN._replace(causal=False),
    Masked(window=(9, 0)),
    Masked(CU_SEQLENS, (9, 0)),
    Masked(sinks=True),
    Masked(CU_SEQLENS, causal=False),
    EVERYTHING,
    Masked(window=(9, 4), causal=False),
    Masked(length=256, kv_heads=8),
    Masked(length=1201, heads=2, kv_heads=1),  # blocks cut for the kernel; one KV head
)
TINY = (
    Masked((0, 2, 5), length=5),
    Masked((0, 4, 5), causal=False, length=5),
    Masked((0, 1, 5), (1, 0), sinks=True, length=5),
)
"""Five tokens: on four ranks one holds padding alone, some send and receive nothing."""


def fits(method, options, mask, size):
    """True if each rank that exchanges heads gets a query head."""
    return mask.heads >= (size if method == "ulysses" else options.get("ulysses_degree", 1))


def some_cases(size):
    """Every method packed and not, in float64 and float32.

    Other masks come too, of five tokens among them.

    Those with options, and all but on two ranks, have one of each by turns; the two backwards take
    turns too.
    """
    cases = []
    for i, (method, options) in enumerate(compositions(size)):
        pairs = list(product(DTYPES[:2], (PLAIN, PACKED)))
        few = options or size != 2
        if few:
            pairs = [pairs[0], pairs[3]] if i % 2 else [pairs[1], pairs[2]]
        turns = range(1 if few else 2)
        pairs += [
            (DTYPES[(i + j + size) % 3], MASKS[(2 * i + j + size // 2) % len(MASKS)]) for j in turns
        ]
        pairs.append((torch.float64, TINY[i % 3]))
        cases += [
            (method, {**options, "backward": MOVES[(i + j + size // 2) % 2]}, mask, dtype)
            for j, (dtype, mask) in enumerate(pairs)
            if fits(method, options, mask, size)
        ]
    return cases


@pytest.mark.parametrize(
    "size", [1, 2, 3, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in SLOW_RANKS)]
)
def test_every_method_is_exact_and_sends_what_the_plan_says(size):
    check(size, some_cases(size))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, *SLOW_RANKS])
def test_the_same_under_every_mask_and_for_both_directions_of_the_backward(size, dtype):
    every = product(compositions(size), MOVES, (PLAIN, PACKED, *MASKS))
    cases = [
        (method, {**options, "backward": moves}, mask, dtype)
        for (method, options), moves, mask in every
    ]
    check(size, [case for case in cases if fits(*case[:3], size)])


def placement_left_out(patch):
    """KV stays where it was gathered."""
    send = Transport.send_recv

    def stay(self, tensors, transfer, *rest):
        return (lambda: tensors) if transfer.due == 1 else send(self, tensors, transfer, *rest)

    patch.setattr(Transport, "send_recv", stay)


def parts_without_weights(patch):
    """Partial results are added however much a query attends to each."""
    patch.setattr(executor, "merged", lambda out, lse: (out.mean(0), torch.logsumexp(lse, 0)))


def stripes_without_the_shift(patch):
    """The diagonal is seen in every round of striping."""

    def compare(rows, columns, shift, q0, k0):
        return [(q0, q0 + rows, k0, k0 + columns, CAUSAL if shift < columns else FULL)]

    patch.setattr(tiles, "_compare", compare)


def halo_one_row_short(patch):
    """The last row that a rank receives is zero."""
    filled = NeededRows._filled

    def short(self, *rest):
        tensors = tuple(x.clone() for x in filled(self, *rest))
        for x in tensors:
            x[:, -1:] = 0
        return tensors

    patch.setattr(NeededRows, "_filled", short)


def sinks_of_other_heads(patch):
    """Sinks are given to the next head."""
    local = HeadExchange.local_heads
    patch.setattr(HeadExchange, "local_heads", lambda self, sinks: local(self, sinks).roll(1))


def nothing(patch):
    """Leave all as it is."""


TEAM = ("wallfacer", {"team_size": 2}, PLAIN)
CONTROLS = [
    *((nothing, *TEAM), (placement_left_out, *TEAM), (parts_without_weights, *TEAM)),
    (stripes_without_the_shift, "striped", {}, Masked(length=256, kv_heads=8)),
    *(
        (fault, method, options, mask)
        for method, options in (
            ("exchange", {}),
            ("zigzag", {}),
            ("exchange", {"ulysses_degree": 2, "ranks_per_node": 2}),
        )
        for fault, mask in (
            (nothing, EVERYTHING),
            (nothing, EVERYTHING._replace(cu_seqlens=(0, 7, 30, 80, 123))),
            (nothing, EVERYTHING._replace(window=(8, 0))),
            (nothing, EVERYTHING._replace(window=(10, 0))),
            (halo_one_row_short, EVERYTHING),
            (sinks_of_other_heads, EVERYTHING),
        )
    ),
]
"""Faults that break the attention in silence, and where.

Masks other than EVERYTHING are taken for it.
"""


def broken(rank, world_size, controls):
    results = []
    for fault, *case in controls:
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            results.append(attended(Ranks(), *case, torch.float64)[0])
    return results if rank == 0 else []


def test_what_is_wrong_in_silence_is_seen():
    """Negative controls of all comparisons here."""
    for (fault, *case), got in zip(CONTROLS, run_ranks(broken, 4, CONTROLS)[0], strict=True):
        mask = case[-1]
        right = mask if mask.window is None else EVERYTHING
        errors = error(got, truth(right, torch.float64))
        if fault is nothing and mask == right:
            assert max(errors) < 1e-12, case
        elif mask.window is None:
            assert max(errors) > (1e-3 if case[0] == "striped" else 1e-2), (fault, case)
        else:
            assert min(errors[:4]) > 1e-3, (fault, case)


def attend_as_rings(rank, world_size):
    """Methods that come down to one ring."""
    rings = [
        ("zigzag", {}),
        ("wallfacer", {}),
        ("double_ring", {}),
        ("double_ring", {"ranks_per_node": 1}),
    ]
    ring_options = ((method, {**options, "backward": "queries"}) for method, options in rings)
    return [attended(Ranks(), *method, PLAIN, torch.float32)[0] for method in ring_options]


def test_one_member_or_one_node_is_the_plain_ring_to_the_bit():
    for zigzag, *others in run_ranks(attend_as_rings, 4):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(zigzag, other, strict=True))


def attend_side_by_side(rank, world_size):
    """Two sequences at once, each on every other rank, with groups of their own within."""
    half = world_size // 2
    group = [dist.new_group(list(range(first, world_size, 2))) for first in (0, 1)][rank % 2]
    results = []
    for method, options in compositions(half):
        cp = context_parallel(method, seq_len=PLAIN.length, group=group, **options)
        q, k, v, _ = (cp.shard(x, dim=1) for x in inputs(PLAIN, torch.float64))
        results.append([cp.unshard(cp.attend(q + rank % 2, k, v), dim=1)])
    return results


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_groups_of_two_sequences_do_not_meet(ranks):
    q, k, v, _ = inputs(PLAIN, torch.float64)
    want = [[reference.attention(q + other, k, v, causal=True)[0]] for other in (0, 1)]
    for rank, results in enumerate(run_ranks(attend_side_by_side, ranks)):
        assert max(max(error(got, want[rank % 2])) for got in results) < 1e-13


def padding_reaches_nothing(rank, world_size):
    """True where unsharding undoes sharding and marks padding.

    Return also what padding's gradients make of dk and dv.
    """
    x, undone, gradients = torch.arange(2 * 5 * 3).reshape(2, 5, 3), [], []
    for method, causal in product(METHODS, (True, False)):
        cp = context_parallel(method, seq_len=5, group=dist.group.WORLD, causal=causal)
        shard, padding = cp.shard(x, dim=1, pad_value=-1), cp.positions >= 5
        undone.append(
            torch.equal(cp.unshard(shard, dim=1), x) and bool((shard[:, padding] == -1).all())
        )
        q, k, v = (torch.randn(1, cp.plan.local_len, 4, 8, requires_grad=True) for _ in range(3))
        dout = torch.zeros_like(q)
        dout[:, padding] = 1
        dk, dv = torch.autograd.grad(cp.attend(q, k, v), (k, v), dout)
        gradients += [x[:, ~padding].abs().sum().item() for x in (dk, dv)]
    return undone, gradients


def test_padding_is_marked_and_sees_and_changes_nothing_of_the_sequence():
    for undone, gradients in run_ranks(padding_reaches_nothing, 4):
        assert all(undone)
        assert not any(gradients)


def test_shapes_that_do_not_fit_are_named():
    cp = context_parallel("zigzag", seq_len=16)
    q = torch.randn(1, 16, 4, 8)
    with pytest.raises(ContextError, match=r"dimension 1 has 12 positions, .* 16"):
        cp.shard(q[:, :12], dim=1)
    with pytest.raises(ContextError, match="16 local positions"):
        cp.attend(q[:, :8], q[:, :8], q[:, :8])
    with pytest.raises(ContextError, match="multiple of the key heads"):
        cp.attend(q, q[:, :, :3], q[:, :, :3])


def test_the_attention_is_one_operator_that_autograd_and_tracing_accept():
    cp = context_parallel("striped", seq_len=16)
    q, k, v = (torch.randn(1, 16, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    strided = [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)
    ]
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    handles = cp._executor.handle, cp.handle.tensor
    attention = torch.ops.longmesh.context_attention.default
    torch.library.opcheck(attention, (q, k, v, sinks, 0.3, *handles, [3, 0], None))
    torch.library.opcheck(attention, (*strided, None, 0.3, *handles, [], None))


def exchange_heads(rank, world_size):
    cp = context_parallel("ulysses", seq_len=16, group=dist.group.WORLD)
    for kv_heads in (1, 2):
        x = torch.randn(1, 8, kv_heads, 8, dtype=torch.float64, requires_grad=True)
        torch.library.opcheck(torch.ops.longmesh.tokens_to_heads.default, (x, 2, cp._heads.handle))
    x = torch.randn(1, 16, 1, 8, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.longmesh.heads_to_tokens.default, (x, 2, 2, cp._heads.handle))


def test_the_exchange_of_heads_is_an_operator_that_autograd_and_tracing_accept():
    run_ranks(exchange_heads, 2)

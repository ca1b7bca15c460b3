"""Linear attention over real gloo ranks against float64 in one process.

out, every gradient, bytes, and their order.
"""

import math
from functools import cache, partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

from kernels import reference
from kernels.ops import linear_attention
from parallel.context import STATE_METHODS, ContextError, Traffic, context_parallel
from parallel.context.linear import state
from parallel.context.transport import Transport
from runtime.ranks import run_ranks
from tests.compositions import STATES
from tests.parallel.context.attended import error
from tests.parallel.context.linear.cases import CU_SEQLENS, with_gradients

BATCH, HEADS, WIDTH = 2, 8, 8
LOG_DECAY = tuple(math.log(decay) for decay in (1.0, 0.999, 0.99, 0.9, 0.7, 0.5, 0.3, 0.2))
Case = tuple[str, str, int, tuple[int, ...] | None, torch.dtype]
"""Method, layout, length, documents, dtype."""
LENGTHS = [
    (256, None),
    (251, None),  # padded on any number of ranks
    (5, None),  # on 8 ranks some have nothing but padding
    (251, CU_SEQLENS),  # documents over several ranks, and several documents on one
    (256, (0, 64, 96, 128, 256)),  # that end where ranks do
]


def inputs(length, dtype):
    """q, k, v and the gradient of out, the same on every rank.

    float64 values that ``dtype`` holds exactly.
    """
    generator = torch.Generator().manual_seed(7)
    widths = (WIDTH, WIDTH, WIDTH + 1, WIDTH + 1)
    return tuple(
        torch.randn(BATCH, length, HEADS, width, generator=generator, dtype=torch.float64)
        .to(dtype)
        .double()
        for width in widths
    )


@cache
def truth(length, cu_seqlens, dtype):
    def attend(q, k, v):
        return reference.linear_attention(q, k, v, LOG_DECAY, cu_seqlens=cu_seqlens)[0]

    return with_gradients(attend, list(inputs(length, dtype)))


@cache
def one_process(length, cu_seqlens, dtype):
    def attend(q, k, v):
        return linear_attention(q, k, v, LOG_DECAY, cu_seqlens=cu_seqlens, backend="chunked")[0]

    return with_gradients(attend, [x.to(dtype) for x in inputs(length, dtype)])


def attend_on_ranks(rank, world_size, cases, rates=LOG_DECAY):
    """[out, dq, dk, dv] of the whole sequence for each case."""
    results = []
    for method, layout, length, cu_seqlens, dtype in cases:
        cp = context_parallel(
            method, seq_len=length, group=dist.group.WORLD, documents=cu_seqlens, layout=layout
        )
        local = [cp.shard(x.to(dtype), dim=1) for x in inputs(length, dtype)]
        # What padding holds must reach nothing.
        local = [
            x.index_fill(1, (cp.positions >= length).nonzero().flatten(), torch.nan) for x in local
        ]
        outputs_of_rank = with_gradients(partial(cp.attend_linear, log_decay=rates), local)
        results.append([cp.unshard(x, 1) for x in outputs_of_rank])
    return results


def all_cases():
    """All in float64; padded sequences of one and of several documents in the other dtypes too."""
    cases = [(*method, *length) for method in STATES for length in LENGTHS]
    rounded = [case for case in cases if case[2] == 251]
    dtypes = {torch.float64: cases, torch.float32: rounded, torch.bfloat16: rounded}
    return [(*case, dtype) for dtype, chosen in dtypes.items() for case in chosen]


@pytest.mark.parametrize("world_size", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_and_documents_are_exact(world_size):
    cases = all_cases()
    for case, got in zip(cases, run_ranks(attend_on_ranks, world_size, cases)[0], strict=True):
        want = truth(*case[2:])
        if case[-1] == torch.float64:
            limits = [1e-12] * 4
        else:
            min_limit = 1e-5 if case[-1] == torch.float32 else 0
            limits = [max(1.5 * limit, min_limit) for limit in error(one_process(*case[2:]), want)]
        for name, measured, limit in zip(
            ("out", "dq", "dk", "dv"), error(got, want), limits, strict=True
        ):
            assert measured <= limit, f"{case}: {name} has {measured:.3g}, the limit is {limit:.3g}"


def states_not_decayed(patch):
    """States that do not decay on their way."""
    patch.setattr(state, "decayed_state", lambda carried, *_: carried)


def gradients_not_passed(patch):
    """Gradients of states that stay where they are."""
    passed = state.StateExecutor._pass_states

    def without(self, *arguments, reverse=False):
        *others, enter = arguments
        return passed(self, *others, (lambda *_: None) if reverse else enter, reverse=reverse)

    patch.setattr(state.StateExecutor, "_pass_states", without)


PASSED = [
    (method, layout, 251, None, torch.float64)
    for method, layout in STATES
    if method in STATE_METHODS
]


def attend_broken(rank, world_size):
    results = []
    for fault in (states_not_decayed, gradients_not_passed):
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            results.append(attend_on_ranks(rank, world_size, PASSED))
    return results


def test_a_state_not_decayed_and_a_gradient_not_passed_are_noticed():
    not_decayed, not_passed = run_ranks(attend_broken, 4)[0]
    for tensors, decayed in ((not_decayed, False), (not_passed, True)):
        for got in tensors:
            errors = error(got, truth(251, None, torch.float64))
            assert max(errors[2:]) > 1e-3
            assert (errors[0] > 1e-3) != decayed


def test_the_decays_of_other_heads_would_be_seen():
    case = ("ulysses", "contiguous", 251, None, torch.float64)
    rates = LOG_DECAY[:4] * 2  # what both of 2 ranks would have if neither took its own
    (got,) = run_ranks(attend_on_ranks, 2, [case], rates)[0]
    assert min(error(got, truth(*case[2:]))) > 1e-3


def count_bytes(rank, world_size, lengths):
    """Bytes sent forward and backward, which are the plan's."""
    counts = []
    for method, layout in STATES:
        for length, cu_seqlens in product(lengths, (None, (0, 21, 64))):
            if cu_seqlens and length != cu_seqlens[-1]:
                continue
            cp = context_parallel(
                method, seq_len=length, group=dist.group.WORLD, layout=layout, documents=cu_seqlens
            )
            keys = 2 * WIDTH if method == "ulysses" else WIDTH  # as LRPE makes them
            leaves = [
                torch.ones(BATCH, cp.plan.local_len, HEADS, width).bfloat16()
                for width in (keys, keys, WIDTH)
            ]
            out = cp.attend_linear(*(x.requires_grad_() for x in leaves), LOG_DECAY)
            forward, cp.transport.traffic = cp.transport.traffic, Traffic()
            out.sum().backward()
            sizes = {"batch": BATCH, "heads": HEADS, "kv_heads": HEADS, "element_size": 2}
            cost = cp.plan.cost(rank, **sizes, head_dim=keys, value_dim=WIDTH)
            assert (forward, cp.transport.traffic) == (cost.forward, cost.backward)
            counts += [(method, layout, length, forward, cp.transport.traffic)] * (
                cu_seqlens is None
            )
    return counts


def test_bytes_are_those_of_one_state_whatever_the_length_and_grow_with_it_if_heads_are_exchanged():
    """A rank has B N d / P elements of v and of out, and twice as many of q and of k.

    It keeps its own 1 / P of them.
    """
    hidden, ranks = HEADS * WIDTH, 4
    state = 4 * BATCH * hidden**2 // HEADS  # B d^2 / h elements of float32
    for rank, counts in enumerate(run_ranks(count_bytes, ranks, [64, 128, 256, 512])):
        for method, layout, length, forward, backward in counts:
            if (method, layout) == (
                "lasp",
                "zigzag",
            ):  # from 0 to 3, and back from 3's second stretch
                peers = {peer: state for peer in (rank - 1, rank + 1) if 0 <= peer < 4}
                assert forward == backward == Traffic(p2p=peers)
            elif method == "lasp":
                assert forward == Traffic(p2p={rank + 1: state} if rank < 3 else {})
                assert backward == Traffic(p2p={rank - 1: state} if rank > 0 else {})
            else:
                each = state if method == "lasp2" else 2 * 6 * BATCH * length * hidden // ranks**2
                each *= 1 + (layout == "zigzag")
                assert (
                    forward
                    == backward
                    == Traffic(collective={peer: each for peer in range(4) if peer != rank})
                )


def record(rank, world_size, method):
    """The transfers and the products of a rank, in order."""
    events = []

    def logged(owner, name, waits=False):
        function = getattr(owner, name)

        def call(*arguments, **named):
            events.append(name)
            result = function(*arguments, **named)
            if not waits:
                return result
            return lambda: (events.append("wait"), result())[1]

        setattr(owner, name, call)

    def posted(transport, sends, receives, far):
        events.append("receive" if receives else "send")
        arrivals, sent = post(transport, sends, receives, far)
        return [
            lambda arrival=arrival: (events.append("wait"), arrival())[1] for arrival in arrivals
        ], sent

    post, Transport.isend_irecv = Transport.isend_irecv, posted
    logged(Transport, "gather", waits=True)
    for name in ("from_state", "decayed_state"):
        logged(state, name)
    scan_of = state.scan_of
    state.scan_of = lambda name: lambda *a, **n: (events.append("scan"), scan_of(name)(*a, **n))[1]
    cp = context_parallel(method, seq_len=64, group=dist.group.WORLD)
    leaves = [torch.ones(1, cp.plan.local_len, HEADS, WIDTH, requires_grad=True) for _ in range(3)]
    out = cp.attend_linear(*leaves, LOG_DECAY)
    events.append("backward")
    out.sum().backward()
    return events


def test_what_needs_no_other_rank_is_computed_while_the_state_is_on_its_way():
    middle = run_ranks(record, 3, "lasp")[1]
    forward = ["receive", "scan", "wait", "decayed_state", "send", "from_state"]
    assert middle == [*forward, "backward", "receive", *["scan"] * 3, *forward[2:], "from_state"]
    middle = run_ranks(record, 3, "lasp2")[1]
    forward = ["scan", "gather", "scan", "wait", "from_state"]
    backward = ["scan", "gather", *["scan"] * 3, "wait", "from_state", "from_state"]
    assert middle == [*forward, "backward", *backward]


def overflow(rank, world_size, method):
    """The heads [B, T, H] of out and of the gradients that stay finite.

    One key and value overflow.
    """
    tensors = [x.float() for x in inputs(64, torch.float32)]
    for x in tensors[1:3]:
        x[0, 5, 2] = 1e25
    if world_size == 1:
        results = with_gradients(lambda q, k, v: linear_attention(q, k, v, LOG_DECAY)[0], tensors)
        return [x.isfinite().all(-1) for x in results]
    cp = context_parallel(method, seq_len=64, group=dist.group.WORLD)
    results = with_gradients(
        lambda q, k, v: cp.attend_linear(q, k, v, LOG_DECAY), [cp.shard(x, 1) for x in tensors]
    )
    return [cp.unshard(x.isfinite().all(-1), 1) for x in results]


@pytest.mark.parametrize("method", STATE_METHODS)
def test_an_overflow_spoils_what_it_spoils_in_one_process(method):
    out, *gradients = overflow(0, 1, method)
    assert out[:, :5].all()
    assert not out[0, 5:, 2].any()
    assert out[1].all()
    for of_rank in run_ranks(overflow, 2, method):
        assert all(
            torch.equal(got, want) for got, want in zip(of_rank, [out, *gradients], strict=True)
        )


def test_calls_that_do_not_fit_are_named():
    q = torch.randn(1, 16, HEADS, WIDTH)
    cp = context_parallel("lasp", seq_len=16)
    with pytest.raises(
        ContextError, match=r"method lasp passes states on, but softmax attention.*ring, striped"
    ):
        cp.attend(q, q, q)
    with pytest.raises(
        ContextError,
        match=r"method striped passes keys and values on, but linear.*use.*lasp, lasp2, ulysses",
    ):
        context_parallel("striped", seq_len=16).attend_linear(q, q, q, LOG_DECAY)
    with pytest.raises(ContextError, match="does not fit a plan of 16 local positions"):
        cp.attend_linear(q[:, :8], q[:, :8], q[:, :8], LOG_DECAY)
    with pytest.raises(ContextError, match=r"the decay of head 0 is 1\.10"):
        cp.attend_linear(q, q, q, (0.1, *LOG_DECAY[1:]))


def test_the_attention_is_one_operator_that_autograd_and_tracing_accept():
    cp = context_parallel("lasp2", seq_len=16)
    q, k, v = (
        torch.randn(1, 16, HEADS, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    torch.library.opcheck(
        torch.ops.longmesh.state_attention.default,
        (q, k, v, LOG_DECAY, cp._state_executor.handle, cp.handle.tensor),
    )


def test_the_backward_outlives_the_object_that_attended():
    q = torch.randn(1, 16, HEADS, WIDTH, requires_grad=True)
    context_parallel("lasp", seq_len=16).attend_linear(q, q, q, LOG_DECAY).sum().backward()
    want = torch.autograd.grad(reference.linear_attention(q, q, q, LOG_DECAY)[0].sum(), q)[0]
    torch.testing.assert_close(q.grad, want)

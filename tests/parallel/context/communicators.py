"""All ranks of a plan, one after another, on tensors without memory.

What they posted is then played as NCCL does it.

Each communicator is a stream of its own on every rank: its operations run in the order in which
they were posted, and the first of them starts when the rank's computation has come to where it was
posted. A message is through when both sides have started, a collective when all ranks have; the
computation stands still where it waits for one.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from kernels import attention, cuda
from kernels.blocks import Keys, Rows
from parallel.context import Plan, transport
from parallel.context.executor import Executor
from parallel.context.linear.relayout import Relayout
from parallel.context.linear.state import StateExecutor
from parallel.context.staged import StagedExecutor
from parallel.context.transport import HeadExchange


class Group(NamedTuple):
    """A process group: its ranks in that of the plan, and which of these ranks' it is."""

    ranks: tuple[int, ...]
    number: int


class Part(NamedTuple):
    """One tensor of an operation: of a message, or, without a peer, of a whole collective."""

    what: str
    peer: int | None
    size: int


class Operation(NamedTuple):
    """The parts that a rank posts on a group at once.

    With ``waits``, it is the place where its computation waits for them.
    """

    group: Group
    parts: tuple[Part, ...]
    waits: bool = False


class Noted:
    """The transport's calls of ``torch.distributed``, noted for one rank."""

    irecv, isend, P2POp = (
        "receive",
        "send",
        staticmethod(lambda *args, **named: (*args, *named.values())),
    )

    def __init__(self):
        self.operations: list[tuple[Operation, int]] = []
        """Each with the index of what it waits for, or its own."""
        self._made = Counter[tuple[int, ...]]()

    def post(self, group, *parts):
        """Note an operation; return a work as torch's, whose wait is noted too."""
        index = len(self.operations)
        self.operations.append((Operation(group, parts), index))
        noted = Operation(group, parts, waits=True)
        return type("Work", (), {"wait": lambda _: self.operations.append((noted, index))})()

    def get_process_group_ranks(self, group):
        return [*group.ranks]

    def new_group(self, ranks, timeout, use_local_synchronization):
        """Make a group: its members meet, and the host waits for them."""
        assert use_local_synchronization, "other ranks make none"
        self._made[tuple(ranks)] += 1
        group = Group(tuple(ranks), self._made[tuple(ranks)])
        self.post(group, Part("new_group", None, 0)).wait()
        return group

    def batch_isend_irecv(self, operations):
        """Post messages at once, on one group; one work for all, as NCCL's."""
        (group,) = {group for _, _, group, _ in operations}
        return [
            self.post(
                group, *(Part(what, group.ranks[peer], x.nbytes) for what, x, _, peer in operations)
            )
        ]

    def all_gather(self, out, x, group, async_op):
        assert async_op
        assert out.nbytes == len(group.ranks) * x.nbytes
        return self.post(group, Part("all_gather", None, x.nbytes))

    def all_to_all_single(self, out, x, *parts, group):
        """With the rows from and to each rank these are messages, and none where there are none."""
        if parts:
            each = [("receive", out), ("send", x)]
            rows = [
                (what, peer, n * y[0].nbytes)
                for (what, y), size in zip(each, parts, strict=True)
                for peer, n in enumerate(size)
                if n
            ]
            self.post(
                group, *(Part(what, group.ranks[peer], count) for what, peer, count in rows)
            ).wait()
            return
        assert out.nbytes == x.nbytes
        self.post(group, Part("all_to_all", None, x.nbytes)).wait()

    def all_reduce(self, x, group):
        self.post(group, Part("all_reduce", None, x.nbytes)).wait()


class GpuTransport(transport.Transport):
    """A rank's links as on a GPU, where NCCL connects before the first message."""

    def connect_all(self, device):
        with patch.object(torch, "zeros", lambda *size, device: torch.empty(*size, device="meta")):
            super().connect_all(torch.device("cuda"))


Timeline = list[tuple[Operation, int]]
Computes = Callable[[Plan, int, transport.Transport], None]


def timelines(plan, compute):
    """The operations that each rank posts and waits for while it computes."""
    all_timelines, everyone = [], Group(tuple(range(plan.size)), 0)
    for rank in range(plan.size):
        noted = Noted()
        with (
            patch.object(transport, "dist", noted),
            patch.object(transport, "all_gather_single", noted.all_gather),
            patch.object(attention, "merge_", _merge),
            patch.object(cuda, "merge_", _merge),
        ):
            compute(plan, rank, GpuTransport(plan.geometry, everyone, rank))
        all_timelines.append(noted.operations)
    return all_timelines


def _merge(out, lse, block_out, block_lse):
    """Take what ``kernels.blocks.merge_`` takes.

    The shape function of logaddexp took half of all time.
    """
    assert out.shape == block_out.shape == (*lse.shape, out.shape[-1])
    assert lse.shape == block_lse.shape
    assert out.dtype == lse.dtype == block_lse.dtype == torch.float32


def softmax(backend="aten", heads=8, kv_heads=2, width=64, strided=False):
    """Forward and backward of a softmax attention in bfloat16.

    Of ``strided`` tensors a head lies in pieces.
    """

    def compute(plan, rank, links):
        outside = HeadExchange(links)
        executor = Executor(links, backend)
        if (stages := plan.geometry.options.ulysses_head_chunks) > 1:
            executor = StagedExecutor(links, backend, outside, stages)
            outside = HeadExchange(links, (rank,))
        counts = (heads, kv_heads, kv_heads, heads)
        like = [
            torch.empty(2, plan.local_len, n, width, dtype=torch.bfloat16, device="meta")
            for n in counts
        ]
        like = [x.mT.contiguous().mT for x in like] if strided else like
        q, k, v, dout = (outside.to_heads(x) for x in like)
        prefetch = executor.prefetch_kv(k, v) if executor.gathers_keys and not plan.sparse else None
        out, lse = executor.forward(plan, q, Keys(k, v), None, width**-0.5, prefetch)
        results = out, *executor.backward(plan, Rows(q, dout, out, lse), Keys(k, v), width**-0.5)
        for x, want in zip(results, (like[3], *like[:3]), strict=True):
            assert outside.to_tokens(x.to(want.dtype), want.shape[2]).shape == want.shape

    return compute


def states(plan, rank, links):
    """Forward and backward of linear attention whose states travel."""
    executor = StateExecutor(links, "chunked")
    q, k, v, dout = (
        torch.empty(2, plan.local_len, 4, 16, dtype=torch.bfloat16, device="meta") for _ in range(4)
    )
    out, state = executor.forward(plan, q, k, v, [-0.1] * 4)
    for x in (out, *executor.backward(plan, dout, state, q, k, v, [-0.1] * 4)):
        assert x.shape == q.shape


def hybrid(outside):
    """Linear layers in the layout of ``outside``, and a softmax layer in the plan's.

    There is an exchange on both sides.
    """

    def compute(plan, rank, links):
        states(outside, rank, GpuTransport(outside.geometry, links._group, rank))
        relayout = Relayout(outside.geometry, plan.geometry, links)
        x = torch.empty(2, outside.local_len, 8, 64, dtype=torch.bfloat16, device="meta")
        inside = relayout.exchange(x, 0)
        softmax(heads=2 * plan.size, kv_heads=plan.size)(plan, rank, links)
        for out in (
            relayout.exchange(inside, 1),
            relayout.exchange(relayout.exchange(x, 0), 1),
        ):  # gradients go back
            assert (out.shape, out.dtype) == (x.shape, x.dtype)

    return compute


def play(ranks_timelines):
    """Run what all ranks posted to its end; return how many tensors and collectives went through.

    Raises:
        AssertionError: some wait for ever, with what for; or not all ranks of a group are there
            when it connects.
    """
    _check_connected(ranks_timelines)
    next_index, through = [0] * len(ranks_timelines), 0
    streams = {}
    started, ended, counts = set[tuple[Any, ...]](), set[tuple[int, int]](), Counter[Any]()
    waiting_for = {}  # by the first operation of a stream
    moving = True
    while moving:
        moving = False
        for rank, timeline in enumerate(ranks_timelines):
            while next_index[rank] < len(timeline):
                operation, index = timeline[next_index[rank]]
                if operation.waits and (rank, index) not in ended:
                    break
                if not operation.waits:
                    streams.setdefault((rank, operation.group), deque()).append((index, operation))
                next_index[rank], moving = next_index[rank] + 1, True
        for (rank, group), stream in streams.items():
            if stream and (rank, group) not in waiting_for:
                pairs = [_meeting(counts, rank, group, part) for part in stream[0][1].parts]
                started.update(started_key for started_key, _ in pairs)
                waiting_for[rank, group], moving = [key for _, keys in pairs for key in keys], True
        for (rank, group), keys in [*waiting_for.items()]:
            if started.issuperset(keys):
                index, operation = streams[rank, group].popleft()
                ended.add((rank, index))
                del waiting_for[rank, group]
                through, moving = through + len(operation.parts), True
    left = [f"rank {rank} in {streams[rank, group][0][1]}" for rank, group in waiting_for]
    assert not left, f"{len(left)} wait for ever: {'; '.join(left[:4])}"
    return through


def _check_connected(rank_timelines):
    """NCCL connects a group at its first operation, for which all of it must come.

    That goes for messages alone too.
    """
    firsts = {}
    for rank, timeline in enumerate(rank_timelines):
        for operation, _ in timeline:
            firsts.setdefault(operation.group, {}).setdefault(rank, operation)
    for group, members in firsts.items():
        messages = any(
            part.peer is not None for operation in members.values() for part in operation.parts
        )
        assert not messages or {*members} == {*group.ranks}, (
            f"{group} is not connected: only {sorted(members)} post messages"
        )


def _meeting(counts, rank, group, part):
    """The start of a message or collective on this side, and those that it waits for.

    They are starts on others that it needs to go through.

    Between two ranks messages meet in the order of their start, and so do the collectives of a
    group.
    """
    order = (
        (rank, group, "collective") if part.peer is None else (rank, group, part.peer, part.what)
    )
    number = counts[order] = counts[order] + 1
    if part.peer is None:
        return (rank, group, part, number), [(other, group, part, number) for other in group.ranks]
    other = {"send": "receive", "receive": "send"}[part.what]
    return (rank, group, part, number), [(part.peer, group, Part(other, rank, part.size), number)]

"""All ranks of a plan as threads of one process, on one device.

Their transfers are copies, on a GPU on side streams.

A GPU alone so shows whether a plan, its kernels and their waits are right together. Gradients come
from the executor itself: autograd has one thread per GPU, in which ranks would wait for each other
for ever.

Shapes: B batch, S positions, H query heads, K key/value heads, D head width.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.blocks import Keys, Rows
from parallel.context.executor import Executor
from parallel.context.geometry import Geometry
from parallel.context.methods.base import Send
from parallel.context.plan import Plan
from parallel.context.transport import Arrival, HeadExchange, Tensors, Transport

PATIENCE = 20.0
"""Seconds that a rank waits for another."""
Channel = tuple[int, int, str]
"""Sender, receiver, and kind of message; messages of a channel arrive in order."""


class Mail:
    """Messages under way between threads."""

    def __init__(self) -> None:
        self._arrived, self._there = dict[tuple[Channel, int], Any](), threading.Condition()
        self.failed = False
        """True once a rank has failed, so that no other may wait for it."""

    def put(self, channel: Channel, number: int, content: Any) -> None:
        """Deliver."""
        with self._there:
            self._arrived[channel, number] = content
            self._there.notify_all()

    def take(self, channel: Channel, number: int) -> Any:
        """Wait for a message; raise TimeoutError if it does not come, or another rank failed."""
        with self._there:
            if not self._there.wait_for(
                lambda: (channel, number) in self._arrived or self.failed, PATIENCE
            ):
                raise TimeoutError(
                    f"rank {channel[1]} waited for message {number} of rank {channel[0]} "
                    f"({channel[2]})"
                )
            if self.failed:
                raise TimeoutError(f"rank {channel[1]} stops, since another rank failed")
            return self._arrived.pop((channel, number))

    def fail(self) -> None:
        """Let all who wait stop."""
        with self._there:
            self.failed = True
            self._there.notify_all()


class ThreadTransport(Transport):
    """One rank's links to the ranks of the same process."""

    def __init__(self, geometry: Geometry, rank: int, mail: Mail, device: torch.device) -> None:
        super().__init__(geometry, None, rank)
        self._mail, self._device = mail, device
        self._sent, self._expected = Counter[Channel](), Counter[Channel]()
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _new_group(self, ranks: tuple[int, ...], timeout: timedelta | None) -> None:
        return None

    def connect_all(self, device: torch.device) -> None:
        return

    def _send(self, tensors: Sequence[Tensor], to: int, kind: str) -> None:
        """Copy the tensors for another rank.

        It waits for the copy and not for this rank's stream.
        """
        channel, event = (self.rank, to, kind), None
        if self._copies is None:
            copies = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
        else:
            self._copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._copies):
                copies = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
                event = self._copies.record_event()
            for x in tensors:
                x.record_stream(self._copies)  # it may be freed before it is copied
        self._mail.put(channel, self._sent[channel], (tuple(copies), event))
        self._sent[channel] += 1

    def _coming(self, source: int, kind: str) -> Arrival:
        """Expect the next message of a rank; return the function that waits for it."""
        channel = (source, self.rank, kind)
        number = self._expected[channel]
        self._expected[channel] += 1

        def wait() -> Tensors:
            copies, event = self._mail.take(channel, number)
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
                for x in copies:
                    x.record_stream(torch.cuda.current_stream())
            return copies

        return wait

    def isend_irecv(
        self, sends: list[tuple[int, Tensors]], receives: list[tuple[int, Tensors]], far: bool
    ) -> tuple[list[Arrival], Callable[[], object]]:
        kind = "far" if far else "near"
        for peer, tensors in sends:
            self._send(tensors, peer, kind)
        return [self._coming(peer, kind) for peer, _ in receives], lambda: None

    def send_recv(self, tensors: Tensors, send: Send, far: bool) -> Arrival:
        return self.isend_irecv([(send.to, tensors)], [(send.source, ())], far)[0][0]

    def gather(self, tensors: Tensors, ranks: tuple[int, ...], *, by_rank: bool = False) -> Arrival:
        if len(ranks) == 1:
            return lambda: tensors
        order = None if by_rank else self._order(ranks, tensors[0].shape[1], self._device)
        for other in ranks:
            self._send(tensors, other, "gather")
        coming = [self._coming(other, "gather") for other in ranks]

        def wait() -> Tensors:
            joined = (
                torch.cat(parts, 1)
                for parts in zip(*(arrival() for arrival in coming), strict=True)
            )
            return tuple(x if order is None else x.index_select(1, order) for x in joined)

        return wait

    def exchange(self, parts: Tensor, ranks: tuple[int, ...]) -> Tensor:
        for other, part in zip(ranks, parts, strict=True):
            self._send((part,), other, "exchange")
        return torch.stack([self._coming(other, "exchange")()[0] for other in ranks])


@cache
def pool(size: int) -> ThreadPoolExecutor:
    """Return the threads of so many ranks.

    cuDNN's graphs are built anew in every thread, for up to half a second.
    """
    return ThreadPoolExecutor(size)


def attend(plan: Plan, inputs: Sequence[Tensor], backend: str = "auto") -> list[Tensor]:
    """Attend with all ranks of a plan of a softmax attention, each a thread.

    Args:
        inputs: q and dout ``[B, S, H, D]``, k and v ``[B, S, K, D]`` as (q, k, v, dout), on the
            device to run on.

    Returns:
        out, dq, dk and dv of the whole sequence, in its order.

    Raises:
        TimeoutError: a rank waited in vain; or what the first rank that failed raised.
    """
    mail, errors = Mail(), list[BaseException]()
    outputs: list[list[Tensor]] = [[] for _ in range(plan.size)]

    def run(rank: int) -> None:
        try:
            outputs[rank] = _attend(plan, rank, mail, inputs, backend)
        except BaseException as error:
            errors.append(error)
            mail.fail()

    wait([pool(plan.size).submit(run, rank) for rank in range(plan.size)])
    if errors:
        raise errors[0]
    whole = [
        x.new_zeros(x.shape[0], plan.padded_len, *x.shape[2:]) for x in (inputs[3], *inputs[:3])
    ]
    for rank, parts in enumerate(outputs):
        for into, part in zip(whole, parts, strict=True):
            into[:, plan.positions(rank).to(into.device)] = part
    return [x[:, : plan.seq_len] for x in whole]


@torch.no_grad()
def _attend(
    plan: Plan, rank: int, mail: Mail, inputs: Sequence[Tensor], backend: str
) -> list[Tensor]:
    device, scale = inputs[0].device, inputs[0].shape[-1] ** -0.5
    transport = ThreadTransport(plan.geometry, rank, mail, device)
    heads, executor = HeadExchange(transport), Executor(transport, backend)
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        torch.cuda.set_stream(stream)  # of this thread
    positions = plan.positions(rank).to(device)
    padding = plan.padded_len - plan.seq_len
    q, k, v, dout = (
        heads.to_heads(
            torch.cat([x, x.new_zeros(x.shape[0], padding, *x.shape[2:])], 1)[:, positions]
        )
        for x in inputs
    )
    out, lse = executor.forward(plan, q, Keys(k, v), None, scale)
    gradients = executor.backward(plan, Rows(q, dout, out, lse), Keys(k, v), scale)
    results = [
        heads.to_tokens(x.to(like.dtype), like.shape[2])
        for x, like in zip((out, *gradients), (inputs[3], *inputs[:3]), strict=True)
    ]
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return results

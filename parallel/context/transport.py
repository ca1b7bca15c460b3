"""Transport: move tensors between ranks, or exchange their heads, and count the bytes.

Tokens are dimension 1 of most tensors here: ``[B, T, ...]``. Sends, receives and gathers start at
once and return functions that wait for them, so that the caller can compute meanwhile.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context.geometry import Geometry, gather_order
from parallel.context.methods.base import Send
from parallel.context.traffic import Traffic
from runtime.tensors import Handles, accum_dtype

Tensors = tuple[Tensor, ...]
Arrival = Callable[[], Tensors]
"""Function that waits for a transfer and returns the tensors that arrived."""
# torch 2.13 renamed all_gather_into_tensor, and warns about the old name.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Transport:
    """One rank's links to the other ranks of a geometry.

    It creates the subgroups once: every rank of ``group`` creates those to which it belongs, in the
    same order; ranks of other groups need not take part.

    Point-to-point transfers have no tags, since NCCL has none. Two ranks match their transfers by
    order alone, so both sides must post them in the order of the plan. Sends that are due several
    rounds later would break this pipeline: they would queue ahead of a small send that the next
    round waits for. Such sends use a second group, ``far``, with its own queue.
    """

    def __init__(
        self,
        geometry: Geometry,
        group: dist.ProcessGroup | None,
        rank: int,
        timeout: timedelta | None = None,
        links: "Transport | None" = None,
    ) -> None:
        """Create the links, or reuse those of a transport whose geometry differs only in length."""
        self.geometry = geometry
        self.rank = rank
        self.traffic = Traffic()
        """Bytes sent to each peer so far; assign an empty ``Traffic`` to reset the count."""
        self._group = group
        self._far = group
        self._connected: set[dist.ProcessGroup] = set()
        everyone = tuple(range(geometry.size))
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {everyone: group}

        if links is not None:
            self._connected = links._connected
            self._groups = links._groups
            self._far = links._far
            return

        for ranks in (geometry.head_group(rank), geometry.teammates(rank), geometry.holders(rank)):
            if len(ranks) > 1 and ranks not in self._groups:
                self._groups[ranks] = self._new_group(ranks, timeout)

        if any(
            send.due > index + 1
            for index, step in enumerate(geometry.rounds_of(rank))
            for send in step.sends
        ):
            self._far = self._new_group(everyone, timeout)

    def _new_group(
        self, ranks: tuple[int, ...], timeout: timedelta | None
    ) -> dist.ProcessGroup | None:
        global_ranks = dist.get_process_group_ranks(self._group)
        return dist.new_group(
            [global_ranks[rank] for rank in ranks], timeout=timeout, use_local_synchronization=True
        )

    def send_recv(self, tensors: Tensors, send: Send, far: bool) -> Arrival:
        """Send tensors to one rank, and receive tensors of the same shapes from another.

        Do not change the tensors until both transfers are done.

        Args:
            tensors: contiguous or not; if not, a contiguous copy is sent.
            send: the ranks to send to and to receive from.
            far: True if the receiver needs the tensors later than in the next round.
        """
        self.connect_all(tensors[0].device)
        if send.to == self.rank:  # then no other rank sends to this one
            return lambda: tensors
        received = tuple(
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors
        )
        (arrival,), sent = self.isend_irecv([(send.to, tensors)], [(send.source, received)], far)

        def wait() -> Tensors:
            sent()
            return arrival()

        return wait

    def isend_irecv(
        self, sends: list[tuple[int, Tensors]], receives: list[tuple[int, Tensors]], far: bool
    ) -> tuple[list[Arrival], Callable[[], object]]:
        """Start sends to any ranks, and receives from any ranks.

        Two ranks must list the messages between them in the same order. Tensors that this rank
        sends to itself are handed over without a copy.

        Args:
            sends: pairs (peer, tensors).
            receives: pairs (peer, buffers); if the peer is this rank, its buffers are not used.
            far: True if no message is needed in the next round.

        Returns:
            One arrival per receive, and a function that waits for the sends; do not change their
            tensors before it returns.
        """
        group = self._far if far else self._group
        to_self: list[Tensors] = []
        leaving: list[tuple[int, Tensors]] = []
        for peer, tensors in sends:
            if peer == self.rank:
                to_self.append(tensors)
            else:
                # Held until the wait: a freed copy could be overwritten while it is sent.
                leaving.append((peer, tuple(x.contiguous() for x in tensors)))

        # gloo wants receives posted first.
        operations = []
        for peer, tensors in receives:
            if peer != self.rank:
                for x in tensors:
                    operations.append(dist.P2POp(dist.irecv, x, group=group, group_peer=peer))
        for peer, tensors in leaving:
            self.traffic.p2p[peer] += sum(x.nbytes for x in tensors)
            for x in tensors:
                operations.append(dist.P2POp(dist.isend, x, group=group, group_peer=peer))
        works = dist.batch_isend_irecv(operations) if operations else []

        # gloo returns one work object per operation. NCCL returns one for all operations, so each
        # arrival then waits for all of them.
        one_each = len(works) == len(operations)
        arrivals: list[Arrival] = []
        handed_over = iter(to_self)
        index = 0
        for peer, tensors in receives:
            if peer == self.rank:
                arrivals.append(_arrival((), next(handed_over)))
            elif one_each:
                end = index + len(tensors)
                arrivals.append(_arrival(works[index:end], tensors))
                index = end
            else:
                arrivals.append(_arrival(works, tensors))
        sent_tensors = tuple(x for _, tensors in leaving for x in tensors)
        sent = _arrival(works[index:] if one_each else works, sent_tensors)
        return arrivals, sent

    def gather(self, tensors: Tensors, ranks: tuple[int, ...], *, by_rank: bool = False) -> Arrival:
        """All-gather tensors over ``ranks``: [B, T, ...] -> [B, len(ranks) * T, ...].

        Tokens are concatenated in the order of positions, or with ``by_rank`` in the order of
        ranks.
        """
        if len(ranks) == 1:
            return lambda: tensors
        order = None if by_rank else self._order(ranks, tensors[0].shape[1], tensors[0].device)

        gathered = []
        works = []
        for tensor in tensors:
            parts = tensor.new_empty(len(ranks), *tensor.shape)
            tensor = tensor.contiguous()
            # gloo takes the concatenated shape, not the stacked one
            works.append(
                all_gather_single(
                    parts.flatten(0, 1), tensor, group=self._groups[ranks], async_op=True
                )
            )
            gathered.append((parts, tensor))  # the tensor stays alive until it is sent
            self._count(ranks, tensor.nbytes)

        def wait() -> Tensors:
            for work in works:
                work.wait()

            results = []
            for parts, _ in gathered:
                joined = parts.transpose(0, 1).flatten(1, 2)  # [B, ranks * T, ...]
                results.append(joined if order is None else joined.index_select(1, order))
            return tuple(results)

        return wait

    def scatter(self, tensor: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """All-to-all that sends each rank the slice for its tokens, and stacks the slices received.

        [B, len(ranks) * T, ...] -> [len(ranks), B, T, ...]. Summed over the first dimension, it is
        the transpose of ``gather``: a reduce-scatter that adds in a fixed order on any backend. It
        moves no more bytes than a reduce-scatter needs, while gloo's own moves twice as many.
        """
        if len(ranks) == 1:
            return tensor[None]
        order = self._order(ranks, tensor.shape[1] // len(ranks), tensor.device)
        if order is not None:
            tensor = torch.empty_like(tensor).index_copy_(1, order, tensor)
        return self.exchange(tensor.unflatten(1, (len(ranks), -1)).transpose(0, 1), ranks)

    def _order(self, ranks: tuple[int, ...], tokens: int, device: torch.device) -> Tensor | None:
        """Return the order that sorts the gathered tokens of ``ranks`` and of their head groups.

        Each head group has ``tokens`` tokens, of the whole sequence or of one slice.
        """
        degree = self.geometry.ulysses_degree
        slice_len = tokens // degree if self.geometry.options.slice_len else 0
        owners: list[int] = []
        for rank in ranks:
            first_rank = rank - rank % degree
            owners += range(first_rank, first_rank + degree)
        return gather_order(self.geometry, tuple(owners), device, slice_len)

    def exchange(self, parts: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """All-to-all: send part i to rank i, receive part j from rank j; both [len(ranks), ...]."""
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self._groups[ranks])
        self._count(ranks, parts[0].nbytes)
        return received

    def exchange_tokens(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Run an all-to-all over the whole group, with parts of unequal sizes, ordered by rank.

        [sum(sends), ...] -> [sum(receives), ...].
        """
        x = x.contiguous()
        received = x.new_empty(sum(receives), *x.shape[1:])
        dist.all_to_all_single(received, x, list(receives), list(sends), group=self._group)
        for rank, tokens in enumerate(sends):
            if tokens and rank != self.rank:
                self.traffic.collective[rank] += tokens * x[0].nbytes
        return received

    def reduced(self, gradient: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """Sum every rank's part for this rank's tokens, in a fixed order.

        [B, len(ranks) * T, ...] -> [B, T, ...].
        """
        return gradient if len(ranks) == 1 else self.scatter(gradient, ranks).sum(0)

    def connect_all(self, device: torch.device) -> None:
        """Make NCCL connect each group that ``isend_irecv`` uses, once.

        Connecting is a collective. In a sparse exchange some ranks may have nothing to send, so
        without this call NCCL would wait for them forever.
        """
        for group in (self._group, self._far):
            if device.type == "cuda" and group is not None and group not in self._connected:
                self._connected.add(group)
                dist.all_reduce(torch.zeros(1, device=device), group=group)

    def _count(self, ranks: Sequence[int], size: int) -> None:
        """Count ``size`` bytes as sent to each of ``ranks``."""
        for rank in ranks:
            if rank != self.rank:
                self.traffic.collective[rank] += size


def _arrival(works: Sequence[dist.Work], tensors: Tensors) -> Arrival:
    """Return a function that waits for ``works`` and returns ``tensors``.

    The function keeps the tensors alive until then: a freed buffer could be reused while the
    network still reads or writes it.
    """

    def wait() -> Tensors:
        for work in works:
            work.wait()
        return tensors

    return wait


class HeadExchange:
    """Exchange of heads (DeepSpeed Ulysses) in a group of ranks, by default a rank's head group.

    An all-to-all in groups of U ranks turns some tokens of all heads into all tokens of some heads;
    a second one reverses this. With fewer KV heads than ranks, several ranks get the same head, and
    their gradients are added. Each direction is a separate operator (ops.py), so that the backward
    pass can reuse the exchanged q, k and v, and recomputation can keep the result of the second
    all-to-all.
    """

    def __init__(self, transport: Transport, ranks: tuple[int, ...] | None = None) -> None:
        self.transport = transport
        self.ranks = ranks or transport.geometry.head_group(transport.rank)
        self.handle = HEAD_EXCHANGES.add(self)

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange [B, T, H, D] -> [B, U * T, max(1, H / U), D].

        Rank u of the group gets the u-th part of the heads.
        """
        degree = len(self.ranks)
        if degree == 1:
            return x
        copies = max(1, degree // x.shape[2])
        heads = x.repeat_interleave(copies, 2) if copies > 1 else x
        parts = heads.unflatten(2, (degree, -1)).permute(2, 0, 1, 3, 4)
        parts = self.transport.exchange(parts, self.ranks)  # [U, B, T, H / U, D]
        return parts.transpose(0, 1).flatten(1, 2).contiguous()

    def to_tokens(self, x: Tensor, heads: int | None = None) -> Tensor:
        """Exchange [B, U * T, H / U, D] -> [B, T, H, D].

        ``heads`` is H; give it if H may be less than U. Then several ranks have gradients of the
        same head, which are added.
        """
        degree = len(self.ranks)
        if degree == 1:
            return x
        heads = heads or x.shape[2] * degree
        parts = self.transport.exchange(x.unflatten(1, (degree, -1)).transpose(0, 1), self.ranks)
        joined = parts.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [B, T, heads, D]
        if joined.shape[2] > heads:
            summed = joined.unflatten(2, (heads, -1)).sum(3, dtype=accum_dtype(x.dtype))
            return summed.to(x.dtype)
        return joined.contiguous()

    def local_heads(self, x: Tensor) -> Tensor:
        """Return the elements of x [H] for the heads of this rank; differentiable."""
        return x.chunk(len(self.ranks))[self.ranks.index(self.transport.rank)]


HEAD_EXCHANGES: Handles[HeadExchange] = Handles()

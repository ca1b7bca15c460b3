"""All ranks of a plan at work on sets of positions, without processes.

``NeededRows`` works so on tensors.
"""

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.attention import ANTI, CAUSAL, FULL
from parallel.context import METHODS, make_plan
from parallel.context.geometry import gather_order
from parallel.context.sparse.flow import Parcel

MASKS = {CAUSAL: np.tril, ANTI: np.triu, FULL: lambda block: block}


class Sent(NamedTuple):
    """Rows that one rank sends to another.

    They say which positions, when, and where they lie in both buffers.
    """

    sender: int
    receiver: int
    index: int  # of the round in which it is sent, -1 before the first
    due: int
    positions: np.ndarray
    sender_rows: np.ndarray
    receiver_rows: np.ndarray


class Gradient(NamedTuple):
    """The pairs [rows, seq_len] that each row's gradient sums up.

    True where its owner computed some of them.
    """

    pairs: np.ndarray
    from_owner: np.ndarray


def visible(plan):
    """The mask of queries and keys, bool [padded_len, padded_len].

    Padding sees nothing and is not seen.
    """
    position = np.arange(plan.padded_len)
    document = np.searchsorted((plan.cu_seqlens or (0, plan.seq_len))[1:], position, side="right")
    behind, ahead = (plan.padded_len if reach is None else reach for reach in plan.mask.reach)
    distance = position - position[:, None]  # [query, key]
    real = position < plan.seq_len
    return (
        (document == document[:, None])
        & (-behind <= distance)
        & (distance <= ahead)
        & (real & real[:, None])
    )


def spelled_out(rows):
    """The rows one by one; checks that they ascend."""
    positions = np.concatenate([np.arange(first, end) for first, end in rows] or [np.arange(0)])
    assert (np.diff(positions) > 0).all()
    return positions


def joined_positions(plan, ranks):
    """Return the positions of ranks in the order in which their tokens are gathered."""
    positions = torch.cat([plan.positions(rank) for rank in ranks])
    order = gather_order(plan.geometry, ranks, torch.device("cpu"))
    return (positions if order is None else positions[order]).numpy()


class Play:
    """One backward of all ranks in step, whose rows travel as a forward's do where ``moves`` is kv.

    Between two ranks sends meet receives in the order in which both are posted, as gloo and NCCL
    have it, in each of the two groups of ranks that the transport uses.

    Raises:
        AssertionError: what is sent, received, held, computed or added up is not what ``seen`` (by
            default: ``visible`` of the plan) asks for.
    """

    def __init__(self, plan, moves, visible_pairs=None):
        self.plan, self.geometry, self.ranks = plan, plan.geometry, range(plan.size)
        self.schedules = [plan.schedule(rank, moves) for rank in self.ranks]
        self.own = [self._joined(self.geometry.head_group(rank)) for rank in self.ranks]
        self.team = [self._joined(self.geometry.team(rank)) for rank in self.ranks]
        self.moves = moves
        visible_pairs = visible(plan) if visible_pairs is None else visible_pairs
        self.seen = visible_pairs.T if moves == "kv" else visible_pairs  # [what moves, what stays]
        self.rows: list[Sent] = []
        self.gradients: list[Sent] = []
        self._links: dict[tuple[int, int, bool], deque[tuple[int, Parcel, Any]]] = {}
        self._needed: list[list[np.ndarray]] = [[] for _ in self.ranks]

    def _joined(self, ranks):
        return joined_positions(self.plan, ranks)

    def run(self):
        """Play all rounds and check what has come about."""
        arriving = [{} for _ in self.ranks]
        returning = [{} for _ in self.ranks]
        pairs_by_rank = [
            np.zeros((len(team), self.plan.padded_len), dtype=int) for team in self.team
        ]
        self._post(
            -1, [schedule[0].joined for schedule in self.schedules], self.own, arriving, self.rows
        )
        for i, step in enumerate(self.geometry.rounds):
            rounds = [schedule[i] for schedule in self.schedules]
            held_positions = [
                self.own[rank]
                if rounds[rank].in_place
                else self._filled(rounds[rank].length, arriving[rank].pop(i, []))
                for rank in self.ranks
            ]
            assert [len(held_positions[rank]) for rank in self.ranks] == [
                step.length for step in rounds
            ]
            self._post(i, [step.moves for step in rounds], held_positions, arriving, self.rows)
            sums = [
                self._computed(rank, held_positions[rank], rounds[rank].tiles, pairs_by_rank[rank])
                for rank in self.ranks
            ]
            for rank in self.ranks:
                self._add(sums[rank], returning[rank].pop(i, []))
                needs_gradient = step.gradient is not None
                self._needed[rank].append(
                    needs_gradient & self.seen[np.ix_(held_positions[rank], self.team[rank])].any(1)
                )
            self._post(
                i,
                [step.gradients for step in rounds],
                sums,
                returning,
                self.gradients,
                held_positions,
            )
        assert not any(self._links.values()), "sent and never received"
        assert not any(arriving), "received and never used"
        self._check_sums(returning, pairs_by_rank)
        self._check_need()
        return self

    def _post(self, index, parcels, tensors, waiting, sent, holders=None):
        """All ranks send parts of ``tensors`` and receive."""
        for rank in self.ranks:
            for parcel in sorted(parcels[rank].sends, key=lambda parcel: parcel.due):
                rows = spelled_out(parcel.rows)
                part = _part(tensors[rank], rows)
                far = parcel.due > index + 1
                self._links.setdefault((rank, parcel.peer, far), deque()).append(
                    (index, parcel, part)
                )
        for rank in self.ranks:
            for parcel in sorted(parcels[rank].receives, key=lambda parcel: parcel.due):
                far = parcel.due > index + 1
                when, other, part = self._links[parcel.peer, rank, far].popleft()
                assert (when, other.due, other.peer) == (index, parcel.due, rank), (
                    "sends and receives do not meet"
                )
                row_index, peer_rows = spelled_out(parcel.rows), spelled_out(other.rows)
                assert len(row_index) == len(peer_rows) > 0, "what is sent is not what is received"
                waiting[rank].setdefault(parcel.due, []).append((row_index, part))
                positions = (tensors if holders is None else holders)[parcel.peer][peer_rows]
                sent.append(
                    Sent(parcel.peer, rank, index, parcel.due, positions, peer_rows, row_index)
                )
                if holders is not None and parcel.peer != rank:
                    assert part.pairs.any(1).all(), "a gradient of 0 is sent"
                    assert not part.from_owner.any(), (
                        "an owner's own part of the gradient leaves it"
                    )

    def _filled(self, length, arriving):
        buffer = np.full(length, -1)
        for row_index, part in arriving:
            assert (buffer[row_index] == -1).all(), "two transfers to one row"
            buffer[row_index] = part
        assert (buffer >= 0).all(), "a row of the buffer that nothing fills"
        assert len(np.unique(buffer)) == length
        return buffer

    def _computed(self, rank, held_positions, tiles, pair_sums):
        pairs = np.zeros((len(held_positions), self.plan.padded_len), dtype=int)
        for tile in tiles:
            moving, staying = (tile.k, tile.q) if self.moves == "kv" else (tile.q, tile.k)
            block = MASKS[tile.kind](
                np.ones((tile.q.stop - tile.q.start, tile.k.stop - tile.k.start), dtype=int)
            )
            block = block.T if self.moves == "kv" else block
            assert block.shape == (len(held_positions[moving]), len(self.team[rank][staying])), (
                "a tile beyond the buffer"
            )
            pairs[moving, self.team[rank][staying]] += block
            pair_sums[staying, held_positions[moving]] += block.T
        return Gradient(pairs, pairs.any(1) & np.isin(held_positions, self.own[rank]))

    def _add(self, sums, returning):
        for row_index, part in returning:
            sums.pairs[row_index] += part.pairs
            sums.from_owner[row_index] |= part.from_owner

    def _check_sums(self, returning, pair_sums):
        """Every visible pair counts once.

        It does so in what moves, at its owner, and in what stays, in its team.
        """
        end = len(self.geometry.rounds)
        for rank in self.ranks:
            home = np.zeros((len(self.own[rank]), self.plan.padded_len), dtype=int)
            for row_index, part in returning[rank].pop(end, []):
                home[row_index] += part.pairs
            assert not returning[rank], "a gradient that nothing waits for"
            np.testing.assert_array_equal(
                home, self.seen[self.own[rank]], f"gradients that reach rank {rank}"
            )
            staying = sum(pair_sums[mate] for mate in self.geometry.teammates(rank))
            np.testing.assert_array_equal(
                staying, self.seen.T[self.team[rank]], f"pairs computed for rank {rank}"
            )

    def _check_need(self):
        """Every row that leaves a rank is seen at the one that gets it, or later.

        A later one gets it from there.
        """
        for sent in sorted(self.rows, key=lambda sent: -sent.index):
            if sent.index >= 0:
                self._needed[sent.sender][sent.index][sent.sender_rows] |= self._needed[
                    sent.receiver
                ][sent.due][sent.receiver_rows]
        for sent in self.rows:
            if sent.sender != sent.receiver:
                assert self._needed[sent.receiver][sent.due][sent.receiver_rows].all(), (
                    "a row is sent that no query sees"
                )


def _part(tensor, rows):
    return (
        Gradient(tensor.pairs[rows], tensor.from_owner[rows])
        if isinstance(tensor, Gradient)
        else tensor[rows]
    )


def drawn(draw, method, size):
    """Any options that the method has, any documents and window."""
    able, options = METHODS[method], dict[str, Any]()
    degree = (
        size
        if able.splits_heads
        else draw.choice([1, *(d for d in range(1, size + 1) if size % d == 0)])
    )
    num_places = size // degree
    options["ulysses_degree"] = degree
    if able.teams:
        options["team_size"] = draw.choice(
            [team for team in range(1, num_places + 1) if num_places % team**2 == 0]
        )
        options["placement"] = draw.choice(["collect_intra", "p2p_intra"])
    if able.nodes:
        options["ranks_per_node"] = degree * draw.choice(
            [node for node in range(1, num_places + 1) if num_places % node == 0]
        )
    if len(able.layouts) > 1:
        options["layout"] = draw.choice(["auto", *able.layouts])
    seq_len, causal = draw.randint(1, 9 * size + 9), draw.random() < 0.6
    if seq_len > 1 and draw.random() < 0.7:
        cuts = draw.sample(range(1, seq_len), min(seq_len - 1, draw.choice([1, 3, 10])))
        options["documents"] = (0, *sorted(cuts), seq_len)
    plan = make_plan(
        method,
        seq_len=seq_len,
        size=size,
        causal=causal,
        multiple=draw.choice([1, 1, 2]),
        **options,
    )
    if draw.random() < 0.5:
        return plan
    widths = [1, 2, max(1, size - 1), draw.randint(1, seq_len)]
    window = draw.choice(widths), 0 if causal else draw.choice([-1, *widths])
    # of one layer, in the layout that balances the others, or of all
    return (
        plan.windowed(window)
        if draw.random() < 0.5
        else plan.under(cu_seqlens=plan.cu_seqlens, window=window)
    )

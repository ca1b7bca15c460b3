"""Compute a picture's data: the rank of each token, and of each (query, key) pair per round."""

from dataclasses import dataclass

import numpy as np

from kernels.attention import CAUSAL, FULL
from parallel.context import ContextError, Plan, make_plan
from parallel.context.layout import Window

PLAIN = ("ring", "striped", "zigzag", "allgather")
PACKED = ("ring", "striped", "zigzag", "exchange")


@dataclass(frozen=True)
class Drawing:
    """Data to draw one method; S is the padded sequence length, P the number of ranks."""

    plan: Plan
    owners: np.ndarray
    """Rank that holds each token: int ``[S]``."""
    rounds: tuple[np.ndarray, ...]
    """For each round, the rank that computes each (query, key) pair, or -1: int ``[S, S]``."""
    work: np.ndarray
    """Number of pairs that each rank computes in each round: int ``[rounds, P]``."""

    @property
    def in_step(self) -> bool:
        """True if ranks start each round together, since they pass all of their KV on."""
        return not self.plan.sparse

    @property
    def slowest(self) -> int:
        """Time until all ranks are done, as a number of pairs that one rank computes.

        If ranks start each round together, it is the sum of the slowest rank's pairs of each
        round, else all pairs of the slowest rank.
        """
        if self.in_step:
            return int(self.work.max(axis=1).sum())
        return int(self.work.sum(axis=0).max())

    @property
    def rows(self) -> int:
        """Number of KV rows (key and value of one token) that all ranks send in a forward pass."""
        sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "element_size": 1}
        costs = [self.plan.cost(rank, **sizes).forward.total for rank in range(self.plan.size)]
        return sum(costs) // 2  # costs count k and v

    @property
    def even(self) -> float:
        """Number of pairs per rank if the work were divided evenly."""
        return float(self.work.sum() / self.work.shape[1])


def drawing(
    method: str,
    seq_length: int,
    size: int,
    causal: bool = True,
    cu_seqlens: tuple[int, ...] | None = None,
    window: Window | None = None,
) -> Drawing:
    """Compute the data to draw a method.

    The arguments are those of ``make_plan``, with ``cu_seqlens`` as its ``documents``.

    Raises ContextError as ``make_plan`` does, and if the method splits heads.
    """
    plan = make_plan(
        method, seq_len=seq_length, size=size, causal=causal, documents=cu_seqlens, window=window
    )
    if plan.geometry.ulysses_degree > 1:
        raise ContextError(
            f"method {method} splits heads: every rank computes every (query, key) pair, so a pair "
            "has no rank's colour; draw another method"
        )

    owners = np.empty(plan.padded_len, dtype=int)
    for rank in range(size):
        owners[plan.positions(rank).numpy()] = rank

    num_rounds = len(plan.rounds(0))
    rounds = [np.full((plan.padded_len, plan.padded_len), -1) for _ in range(num_rounds)]
    work = np.empty((num_rounds, size), dtype=int)
    for rank in range(size):
        for index, step in enumerate(plan.rounds(rank)):
            _mark_pairs(rounds[index], plan, rank, index)
            work[index, rank] = step.pairs

    return Drawing(plan, owners, tuple(rounds), work)


def _positions(plan: Plan, ranks: tuple[int, ...]) -> np.ndarray:
    """Return the positions of several ranks, in ascending order."""
    return np.sort(np.concatenate([plan.positions(rank).numpy() for rank in ranks]))


def _mark_pairs(computed: np.ndarray, plan: Plan, rank: int, index: int) -> None:
    """Write ``rank`` into ``computed`` [S, S] at the pairs that it computes in a round."""
    step = plan.rounds(rank)[index]
    queries = _positions(plan, plan.geometry.team(rank))
    keys = _positions(plan, step.holds)
    for tile in step.tiles:
        visible = np.ones((tile.q.stop - tile.q.start, tile.k.stop - tile.k.start), dtype=bool)
        if tile.kind == CAUSAL:
            visible = np.tril(visible)
        elif tile.kind != FULL:
            visible = np.triu(visible)

        rows, columns = np.nonzero(visible)
        computed[queries[tile.q][rows], keys[tile.k][columns]] = rank

"""Packed documents for tests, and what is true of them token by token."""

from typing import NamedTuple

import numpy as np

from parallel.context.sparse.balanced import ArcLayout, in_parts, travelling
from parallel.context.sparse.rows import Line


def token_work(layout):
    """Keys that each token sees: int64 ``[seq_len]``, 0 for padding."""
    left, right = layout.reach
    work = np.zeros(layout.seq_len, dtype=np.int64)
    for begin, end in zip(layout.cu_seqlens, layout.cu_seqlens[1:], strict=False):
        offset = np.arange(end - begin)
        work[begin:end] = np.minimum(offset, left) + 1 + np.minimum(end - begin - 1 - offset, right)
    return work


def place_work(layout, mask):
    """Work of each place, by the positions of its ranks, under the mask of a layout."""
    work, ranks = token_work(mask), range(layout.size)
    work_by_rank = [work[layout.positions(rank)].sum() for rank in ranks]
    return np.array(work_by_rank).reshape(layout.num_places, layout.team_size).sum(axis=1)


class Transfers(NamedTuple):
    """Rows ``first`` to ``end`` of the place ``whose`` that the place ``who`` sees."""

    who: np.ndarray
    whose: np.ndarray
    first: np.ndarray
    end: np.ndarray


def transfers(layout):
    """The rows that each place's queries see and another place holds, as positions."""
    line = Line(layout.num_places, layout.seq_len)
    rows = travelling(in_parts(layout.pieces(), layout.cu_seqlens_array), line, layout.reach)
    start = line.pairs(rows) * (layout.seq_len + 1)
    return Transfers(
        *np.divmod(line.pairs(rows), layout.num_places), *(edge - start for edge in rows)
    )


def drawn(rng):
    """Any numbers of ranks, teams and tokens.

    Documents of any kind, among them of one token; any mask.
    """
    size, tokens = int(rng.integers(1, 20)), int(rng.integers(1, 60))
    team_size = int(rng.choice([team for team in range(1, size + 1) if size % team == 0]))
    real = size * tokens - int(rng.integers(0, min(size * tokens, 2 * size)) * (rng.random() < 0.4))
    num_boundaries = [0, real - 1, int(rng.integers(0, real)), min(4, real - 1)][rng.integers(4)]
    inner = (
        np.sort(rng.choice(np.arange(1, real), num_boundaries, replace=False))
        if real > 1
        else np.array([])
    )
    if rng.random() < 0.2:
        inner = np.arange(1, real)[:: int(rng.integers(1, real + 1))]  # all equal, but for the last
    causal = bool(rng.random() < 0.6)
    window = (
        (int(rng.integers(-1, 25)), 0 if causal else int(rng.integers(-1, 25)))
        if rng.random() < 0.5
        else None
    )
    cu_seqlens = (0, *inner.astype(int).tolist(), real)
    return ArcLayout(size * tokens, real, size, team_size, cu_seqlens, causal, window)


def lognormal(rng, seq_len):
    return np.clip(np.exp(rng.normal(7.0, 1.6)), 64, seq_len / 4)


def chat(rng, seq_len):
    """Short ones, and 3 % with a heavy tail."""
    long = rng.random() < 0.03
    return np.clip(
        4096 * (1 + rng.pareto(0.9)) if long else np.exp(rng.normal(6.2, 0.8)), 32, seq_len / 2
    )


def short(rng, seq_len):
    return np.clip(rng.normal(500, 120), 100, 1500)


def filled(length, seq_len, seed):
    """Documents of drawn lengths until the sequence is full; the last one is cut."""
    rng, cu_seqlens = np.random.default_rng(seed), [0]
    while cu_seqlens[-1] < seq_len:
        cu_seqlens.append(min(cu_seqlens[-1] + int(length(rng, seq_len)), seq_len))
    return tuple(cu_seqlens)

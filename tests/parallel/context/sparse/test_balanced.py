"""The layout ``balanced``: equal tokens, equal work, few cuts, few rows, whatever the documents.

The traffic is counted too.
"""

import hashlib
import time
from itertools import pairwise

import numpy as np
import pytest

from parallel.context.layout import Layout
from parallel.context.sparse import balanced as balancing
from parallel.context.sparse import circles
from parallel.context.sparse.balanced import ArcLayout
from tests.parallel.context.sparse.packings import (
    chat,
    drawn,
    filled,
    lognormal,
    place_work,
    short,
    transfers,
)


def balanced(cu_seqlens, size, **mask):
    return ArcLayout(cu_seqlens[-1], cu_seqlens[-1], size, 1, cu_seqlens, **mask)


def imbalance(layout, under=None):
    """Largest over mean work of places, under the mask of another layout if there is one."""
    work = place_work(layout, under or layout)
    return work.max() / work.mean()


def share_of_a_ring(layout):
    """Rows received, of those that a ring passes on."""
    rows = transfers(layout)
    return (rows.end - rows.first).sum() / ((layout.num_places - 1) * layout.seq_len)


def check(layout):
    """Equal tokens, work equal to the tolerance and one token's, and at most 2 (P - 1) cuts."""
    owned = [layout.positions(rank) for rank in range(layout.size)]
    assert {len(positions) for positions in owned} == {layout.seq_len // layout.size}
    np.testing.assert_array_equal(np.sort(np.concatenate(owned)), np.arange(layout.seq_len))
    for rank, positions in enumerate(owned):
        assert (np.diff(positions) > 0).all()
        assert all(a.start + a.length < b.start for a, b in pairwise(layout.strides(rank)))
    for place in range(layout.num_places):
        joined = np.concatenate(owned[place * layout.team_size : (place + 1) * layout.team_size])
        place_pieces = layout.pieces().take(np.flatnonzero(layout.pieces().place == place))
        pieces = zip(place_pieces.start, place_pieces.length, strict=True)
        np.testing.assert_array_equal(
            joined, np.concatenate([np.arange(a, a + count) for a, count in pieces])
        )
    _, start, length, document, _ = layout.pieces()
    bounds = np.array([*layout.cu_seqlens, layout.seq_len])  # document -1 is the last, of padding
    assert (start >= bounds[:-1][document]).all()
    assert (start + length <= bounds[1:][document]).all()
    assert len(start) <= len(layout.cu_seqlens) - 1 + (layout.seq_len > layout.real) + 2 * (
        layout.num_places - 1
    )
    work, left, right = place_work(layout, layout), *layout.reach
    max_work = min(left + 1 + right, np.diff(layout.cu_seqlens).max())
    assert np.abs(work - work.mean()).max() <= 0.003 * work.mean() + max_work + 1


def test_any_documents_under_any_mask():
    rng = np.random.default_rng(0)
    for _ in range(100):
        check(drawn(rng))


def flat(beads):
    return beads._replace(slope=0 * beads.slope)


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (
            circles,
            "crossings",
            lambda whole: (
                lambda arcs: (short_arcs := whole(arcs)).on(np.minimum(short_arcs.room, 20))
            ),
        ),
        (balancing, "opened", lambda whole: lambda *args: flat(whole(*args))),
        (circles, "TOLERANCE", lambda whole: 0.1),
    ],
    ids=[
        "arcs 20 tokens off",
        "all tokens of a document with the first one's work",
        "a tolerance of a tenth",
    ],
)
def test_what_is_broken_is_seen(monkeypatch, module, name, broken):
    rng, num_cases = np.random.default_rng(0), 0
    monkeypatch.setattr(module, name, broken(getattr(module, name)))
    balancing._arcs.cache_clear()
    for _ in range(60):
        try:
            check(drawn(rng))
        except AssertionError:
            num_cases += 1
    balancing._arcs.cache_clear()
    assert num_cases > 10


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8, 16, 64])
def test_one_document_is_zigzag(size):
    ours, zigzag = balanced((0, 96 * size), size), Layout("zigzag", 96 * size, size)
    for rank in range(size):
        np.testing.assert_array_equal(ours.positions(rank), zigzag.positions(rank))


@pytest.mark.parametrize(
    ("length", "seq_len", "size", "max_share"),
    [
        (lognormal, 2**14, 8, 0.21),
        (lognormal, 2**17, 16, 0.14),
        (lognormal, 2**20, 64, 0.08),
        (short, 2**17, 16, 0.004),
        (chat, 2**17, 16, 0.25),
    ],
)
def test_work_and_rows_of_packed_sequences(length, seq_len, size, max_share):
    """Rows as a mean of 20 draws.

    Those with one or two of the longest documents have twice as many.
    """
    layouts = [balanced(filled(length, seq_len, seed), size) for seed in range(20)]
    assert max(map(imbalance, layouts[:3])) <= 1.0035
    assert np.mean([share_of_a_ring(layout) for layout in layouts]) <= max_share


def test_a_window_over_one_document_moves_little_more_than_the_halo():
    window = balanced((0, 2**17), 16, window=(1024, 0))
    halo = 15 * 1024 / (15 * 2**17)
    assert imbalance(window) <= 1.001
    assert share_of_a_ring(window) <= 1.35 * halo
    assert share_of_a_ring(balanced((0, 2**20), 64, window=(1024, 0))) <= 1.1 * 1024 / 2**20


def test_each_mask_has_its_own_balance():
    cu_seqlens = filled(lognormal, 2**14, 0)
    masks = [{}, {"window": (256, 0)}, {"causal": False}, {"causal": False, "window": (100, 300)}]
    for mask in masks:
        assert imbalance(balanced(cu_seqlens, 8, **mask)) <= 1.005
    causal, windowed = (balanced(cu_seqlens, 8, **mask) for mask in masks[:2])
    assert imbalance(causal, under=windowed) > 1.05
    assert imbalance(windowed, under=causal) > 1.3


def test_every_machine_finds_the_same():
    """A digest of layouts, taken when they were first made.

    What one rank of many sends, others must expect.
    """
    digest = hashlib.sha256()
    for size, window in [(8, None), (6, (300, 0)), (16, (64, 0))]:
        cu_seqlens = tuple(
            int(n) for n in np.cumsum([0, *(17 + 7919 * n * n % 1543 for n in range(60))])
        )
        seq_len = -(-cu_seqlens[-1] // size) * size
        arrays = ArcLayout(seq_len, cu_seqlens[-1], size, 1, cu_seqlens, window=window).pieces()
        digest.update(np.stack(arrays[:4]).astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "6ece61be6ca6391a"


def test_a_million_tokens_are_planned_in_milliseconds():
    """15 on a quiet core.

    Three times as much leaves room for a slower one, and none for a loop over documents.
    """
    rng = np.random.default_rng(0)
    inner = np.sort(rng.choice(np.arange(1, 2**20), 2099, replace=False)).tolist()
    spent = []
    for _ in range(5):
        balancing._arcs.cache_clear()
        begin = time.thread_time()
        transfers(balanced((0, *inner, 2**20), 64))
        spent.append(time.thread_time() - begin)
    assert min(spent) <= 0.045

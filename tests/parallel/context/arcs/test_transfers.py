"""Rows travel to the ranks that see them and do not hold them, and to no other."""

import numpy as np
import pytest

from parallel.context.arcs import ArcLayout, orders
from tests.parallel.context.arcs.packings import drawn, transfers


def check(packed):
    """Compare with every pair of a query and a key. Returns how many rows travel."""
    place = np.empty(packed.seq_len, dtype=np.int64)
    for rank in range(packed.size):
        place[packed.positions(rank)] = rank // packed.team_size
    tokens = np.arange(packed.real)
    document = np.searchsorted(packed.documents, tokens, "right")
    ahead = tokens[None, :] - tokens[:, None]
    left, right = packed.reach
    sees = (document[:, None] == document[None, :]) & (-left <= ahead) & (ahead <= right)
    expected = np.zeros((packed.places, packed.seq_len), dtype=np.int64)
    for reader in range(packed.places):
        own = place[: packed.real] == reader
        expected[reader, : packed.real] = sees[own].any(axis=0) & ~own
    received, until = np.zeros_like(expected), {}
    rows = transfers(packed)
    for reader, owner, first, end in zip(*rows, strict=True):
        assert first < end
        assert (place[first:end] == owner).all()
        assert until.get((owner, reader), -1) < first  # else they touch
        received[reader, first:end] += 1
        until[owner, reader] = end
    np.testing.assert_array_equal(received, expected)
    assert (np.diff((rows.who * packed.places + rows.whose) * packed.seq_len + rows.first) > 0).all()
    return expected.sum()


def test_rows_that_travel_are_seen_and_rows_that_are_seen_travel():
    rng = np.random.default_rng(0)
    assert sum(check(drawn(rng)) for _ in range(100)) > 10_000


@pytest.mark.parametrize("side", [0, 1])
def test_a_halo_one_row_short_is_seen(monkeypatch, side):
    def short(*of):
        rows = whole(*of)
        return rows._replace(end=rows.end - 1) if side else rows._replace(first=rows.first + 1)

    rng, whole, found = np.random.default_rng(0), orders.rows_seen, 0
    monkeypatch.setattr(orders, "rows_seen", short)
    for _ in range(60):
        try:
            check(drawn(rng))
        except AssertionError:
            found += 1
    assert found > 10


def test_one_document_on_two_places():
    """Zigzag: 0 has 0, 1, 6, 7 and reads 2 to 5; 1 reads 0 and 1."""
    rows = transfers(ArcLayout(8, 8, 2, 1, (0, 8)))
    assert [tuple(map(int, row)) for row in zip(*rows, strict=True)] == [(0, 1, 2, 6), (1, 0, 0, 2)]


def test_whole_documents_send_nothing():
    rows = transfers(ArcLayout(32, 32, 4, 2, (0, 8, 16, 24, 32)))
    assert [len(field) for field in rows] == [0, 0, 0, 0]

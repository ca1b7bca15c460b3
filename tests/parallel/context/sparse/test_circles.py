"""A circle is cut where an arc holds its share of the work: compared with every arc there is."""

import numpy as np
import pytest

from parallel.context.sparse.balanced import opened
from parallel.context.sparse.circles import Circles, crossings, halve, turn
from tests.parallel.context.sparse.packings import drawn


def circles_of(rng):
    """Several circles on a line: one of all documents, or some that it was cut to."""
    packing = drawn(rng)
    beads = opened(packing.bounds, packing.seq_len, packing.reach)
    beads = beads.take(np.argsort(rng.permutation(len(packing.bounds))[beads.document], kind="stable"))
    whole = Circles(beads, np.array([len(beads.start)]), np.array([packing.places]), packing.seq_len // packing.places)
    share, found = whole.work[0] / packing.places, [whole]
    while found[-1].places.max() > 2:
        found.append(halve(found[-1], share, packing.reach)[1])
    return found[rng.integers(len(found))], share, packing.reach


def token_work(circles):
    """Work of each token, circle by circle."""
    beads = circles.beads
    offset = np.arange(beads.length.sum()) - np.repeat(circles.begin, beads.length)
    work = np.repeat(beads.first, beads.length) + offset * np.repeat(beads.slope, beads.length)
    return np.split(work, circles.base[1:])


def test_every_arc_with_its_share_of_work_is_found():
    """The nearer of each two neighbouring arcs between which the surplus changes its sign is found, and no other."""
    rng, several, bent = np.random.default_rng(0), 0, 0
    for _ in range(100):
        circles, _, _ = circles_of(rng)
        inside = [circles.places // 2, (circles.places + 1) // 2][rng.integers(2)]
        inside = np.where(circles.places == 1, 1, inside)
        stops = turn(circles, inside)
        found = crossings(stops)
        bent += stops.bend.any()
        for circle, work in enumerate(token_work(circles)):
            arc = inside[circle] * circles.tokens
            before = np.append(0, np.cumsum(work))
            surplus = before[arc:] - before[: len(before) - arc] - before[-1] * inside[circle] // circles.places[circle]
            own = stops.circle == circle
            np.testing.assert_array_equal(stops.surplus[own], surplus[stops.at[own] - circles.base[circle]])
            change = np.flatnonzero((surplus[1:] <= 0) != (surplus[:-1] <= 0))
            expected = change + (np.abs(surplus[change + 1]) < np.abs(surplus[change]))
            got = np.sort(found.at[found.circle == circle] - circles.base[circle])
            np.testing.assert_array_equal(got, expected)
            several += len(got) > 1
    assert several > 10
    assert bent > 10


def test_both_parts_of_a_circle_have_their_shares_and_keep_the_order():
    rng = np.random.default_rng(1)
    for _ in range(100):
        circles, share, reach = circles_of(rng)
        cuts, halves = halve(circles, share, reach)
        assert halves.places.sum() == circles.places.sum()
        assert halves.counts.sum() == len(halves.beads.start) <= len(circles.beads.start) + 2 * len(circles.places)
        parts = iter(zip(halves.places, token_work(halves), strict=True))
        for places, work, (low, high) in zip(circles.places, token_work(circles), cuts, strict=True):
            assert 0 <= low < high <= len(work)
            for expected in (np.concatenate([work[:low], work[high:]]), work[low:high]):
                if len(expected):
                    got_places, got = next(parts)
                    np.testing.assert_array_equal(got, expected)
                    assert len(got) == got_places * circles.tokens
                    slack = 0.006 * got_places * share + abs(work.sum() / places - share) * got_places + work.max() + 1
                    assert abs(got.sum() - got_places * share) <= slack
        assert next(parts, None) is None


def test_half_of_one_document_is_its_middle():
    """1 + 2 + ... + 8: of 3, 4, 5, 6 half of 36."""
    circles = Circles(opened(np.array([0, 8]), 8, (8, 0)), np.array([1]), np.array([2]), 4)
    cuts, halves = halve(circles, 18.0, (8, 0))
    assert cuts.tolist() == [[2, 6]]
    assert halves.beads.start.tolist() == [0, 6, 2]
    assert halves.beads.first.tolist() == [1, 7, 3]
    assert halves.work.tolist() == [18, 18]


@pytest.mark.parametrize(
    ("reach", "expected"),
    [
        ((9, 0), [1, 2, 3, 4, 5, 1, 1, 2, 3, 0]),  # causal
        ((9, 9), [5, 5, 5, 5, 5, 1, 3, 3, 3, 0]),  # full
        ((2, 0), [1, 2, 3, 3, 3, 1, 1, 2, 3, 0]),
        ((1, 1), [2, 3, 3, 3, 2, 1, 2, 3, 2, 0]),
        ((3, 1), [2, 3, 4, 5, 4, 1, 2, 3, 3, 0]),
        ((0, 9), [5, 4, 3, 2, 1, 1, 3, 2, 1, 0]),
        ((0, 0), [1, 1, 1, 1, 1, 1, 1, 1, 1, 0]),
    ],
)
def test_the_work_of_every_token(reach, expected):
    """Documents of five, one and three tokens, and one of padding."""
    beads = opened(np.array([0, 5, 6, 9]), 10, reach)
    circles = Circles(beads, np.array([len(beads.start)]), np.array([1]), 10)
    assert token_work(circles)[0].tolist() == expected

"""Sets of rows against sets of numbers and triples, and rows seen against brute force."""

import random
from itertools import pairwise

import numpy as np
import pytest

from parallel.context import METHODS, make_plan
from parallel.context.sparse import rows as module
from parallel.context.sparse.rows import (
    Spans,
    as_columns,
    common,
    merged,
    rows_seen,
    union,
    without,
)
from tests.parallel.context.sparse.play import drawn as drawn_plan
from tests.parallel.context.sparse.play import joined_positions, visible


def drawn(draw, length=30):
    """Rows that may be none, all, or many single ones, and the set of them."""
    chosen = {i for i in range(length) if draw.random() < draw.choice([0, 0.2, 0.5, 0.9, 1])}
    return merged((i, i + 1) for i in sorted(chosen)), chosen


def spans(rows):
    return Spans(*np.array(rows, dtype=np.int64).reshape(-1, 2).T)


def spelled_out(row_set):
    """The numbers; checks that the intervals ascend and neither overlap nor adjoin."""
    rows = (
        list(zip(*(x.tolist() for x in row_set), strict=True))
        if isinstance(row_set, Spans)
        else list(row_set)
    )
    edges = [edge for interval in rows for edge in interval]
    assert all(a < b for a, b in pairwise(edges))
    return [i for first, end in rows for i in range(first, end)]


def test_unions_common_rows_and_rests_are_those_of_sets():
    draw = random.Random(0)
    for _ in range(2000):
        (a, in_a), (b, in_b), (c, in_c) = (drawn(draw) for _ in range(3))
        overlapping = [
            (first, first + draw.randint(1, 9))
            for first in draw.choices(range(40), k=draw.randrange(8))
        ]
        numbers = {i for first, end in overlapping for i in range(first, end)}
        for rows, expected in (
            (union(), set()),
            (union(spans(a), spans(b), spans(c)), in_a | in_b | in_c),
            (union(spans(tuple(overlapping))), numbers),
            (merged(sorted(overlapping)), numbers),
            (common(spans(a), spans(b)), in_a & in_b),
            (without(spans(a), spans(b)), in_a - in_b),
        ):
            assert spelled_out(rows) == sorted(expected), (a, b, c, overlapping)


def sets(plan):
    """Pieces and positions of the ranks one by one, and of each team."""
    groups = [(rank,) for rank in range(plan.size)] + [
        plan.geometry.team(rank) for rank in range(plan.size)
    ]
    for ranks in groups:
        yield (
            plan.real_pieces(ranks),
            joined_positions(plan, ranks),
        )


def found(plan, reach, visible_pairs):
    """Return which rows of each set each set sees, bool [sets, all rows of the sets].

    They are computed, and by brute force.
    """
    pieces, positions = zip(*sets(plan), strict=True)
    begin = np.cumsum([0, *map(len, positions)])
    rows = rows_seen(as_columns(pieces), as_columns(pieces), plan.layout.stride, reach)
    got = np.zeros((len(pieces), begin[-1]), dtype=bool)
    for who, whose, first, end in zip(*(column.tolist() for column in rows), strict=True):
        assert 0 <= first < end <= len(positions[whose])
        got[who, begin[whose] + first : begin[whose] + end] = True
    columns = visible_pairs[:, np.concatenate(positions)]
    return got, np.stack([columns[rank_positions].any(0) for rank_positions in positions])


@pytest.mark.parametrize("method", METHODS)
def test_rows_seen_are_those_that_some_query_sees_and_the_other_way_round(method):
    for seed, size in enumerate((1, 2, 3, 4, 6, 8, 9, 12) * 2):
        plan = drawn_plan(random.Random(f"{method} {seed}"), method, size)
        behind, ahead = plan.mask.reach
        np.testing.assert_array_equal(*found(plan, (behind, ahead), visible(plan)), str(plan))
        np.testing.assert_array_equal(*found(plan, (ahead, behind), visible(plan).T), str(plan))


@pytest.mark.parametrize("window", [(1, 0), (2, 0), (6, 0)])
def test_windows_narrower_than_the_stride_see_some_ranks_alone(window):
    plan = make_plan("striped", seq_len=64, size=8, documents=(0, 3, 30, 64), window=window)
    got, want = found(plan, plan.mask.reach, visible(plan))
    np.testing.assert_array_equal(got, want)
    wider, _ = found(plan, (window[0] + 1, 0), visible(plan))
    narrower, _ = found(plan, (window[0] - 1, 0), visible(plan))
    assert (wider != want).any()  # negative controls
    assert (narrower != want).any()


def test_pieces_compared_a_few_at_a_time_make_no_difference(monkeypatch):
    plan = make_plan(
        "striped", seq_len=60, size=6, documents=(0, 3, 11, 30, 31, 60), window=(20, 0)
    )
    everything, nothing = (
        as_columns([plan.real_pieces((rank,)) for rank in range(6)]),
        as_columns([[]]),
    )

    def seen():
        columns = rows_seen(everything, everything, plan.layout.stride, plan.mask.reach)
        return sorted(zip(*(column.tolist() for column in columns), strict=True))

    at_once = seen()
    for few in (1, 2, 7, 100):
        monkeypatch.setattr(module, "AT_ONCE", few)
        assert seen() == at_once
    assert rows_seen(nothing, everything, 1, (None, 0))[0].size == 0
    assert rows_seen(everything, nothing, 1, (None, 0))[0].size == 0

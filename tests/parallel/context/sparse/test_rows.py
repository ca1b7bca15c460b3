"""Intervals against sets of numbers; rows of all owners at all places, on one line, against sets of triples."""

import random
from itertools import pairwise

import numpy as np

from parallel.context.sparse.rows import NOWHERE, Line, Spans, common, count, merged, places_in, union, without


def drawn(draw, length=30):
    """Rows that may be none, all, or many single ones, and the set of them."""
    chosen = {i for i in range(length) if draw.random() < draw.choice([0, 0.2, 0.5, 0.9, 1])}
    return merged((i, i + 1) for i in sorted(chosen)), chosen


def spans(rows):
    return Spans(*np.array(rows, dtype=np.int64).reshape(-1, 2).T)


def spelled_out(found):
    """The numbers; checks that the intervals ascend and neither overlap nor adjoin."""
    rows = list(zip(*(x.tolist() for x in found), strict=True)) if isinstance(found, Spans) else list(found)
    edges = [edge for interval in rows for edge in interval]
    assert all(a < b for a, b in pairwise(edges))
    return [i for first, end in rows for i in range(first, end)]


def test_unions_common_rows_and_rests_are_those_of_sets():
    draw = random.Random(0)
    for _ in range(2000):
        (a, in_a), (b, in_b), (c, in_c) = (drawn(draw) for _ in range(3))
        for found, wanted in (
            (union(spans(a), spans(b), spans(c)), in_a | in_b | in_c),
            (common(spans(a), spans(b)), in_a & in_b),
            (without(spans(a), spans(b)), in_a - in_b),
        ):
            assert spelled_out(found) == sorted(wanted), (a, b, c)


def test_a_union_joins_intervals_that_overlap_in_any_order():
    draw = random.Random(1)
    for _ in range(1000):
        given = [(first, first + draw.randint(1, 9)) for first in draw.choices(range(40), k=draw.randrange(8))]
        numbers = sorted({i for first, end in given for i in range(first, end)})
        assert spelled_out(union(spans(tuple(given)))) == numbers
        assert spelled_out(merged(sorted(given))) == numbers
        assert count(merged(sorted(given))) == len(numbers)


def test_nothing_is_a_set_too():
    some = spans(((2, 4),))
    assert spelled_out(union()) == spelled_out(union(NOWHERE, NOWHERE)) == spelled_out(common(some, NOWHERE)) == []
    assert spelled_out(without(NOWHERE, some)) == []
    assert spelled_out(without(some, NOWHERE)) == [2, 3]


def test_rows_lie_in_a_buffer_where_those_before_them_end():
    draw = random.Random(2)
    for _ in range(2000):
        kept, numbers = drawn(draw)
        part = sorted(i for i in numbers if draw.random() < 0.6)
        offset = draw.randrange(5)
        found = places_in(merged((i, i + 1) for i in part), kept, offset)
        buffer = [None] * offset + sorted(numbers)
        assert [buffer[i] for i in spelled_out(found)] == part


Held = set[tuple[int, int, int]]


def drawn_everywhere(draw, places, rows):
    """The rows that places hold; often the last of one owner and the first of the next, which adjoin on no line."""
    everything = [(place, owner, i) for place in range(places) for owner in range(places) for i in range(rows)]
    share = draw.choice([0.1, 0.5, 1])
    return {one for one in everything if draw.random() < share}


def on(line, held):
    place, owner, row = (np.array(column, dtype=np.int64) for column in zip(*sorted(held), strict=True))
    return union(line.spans(place, owner, row, row + 1))


def spelled_out_everywhere(line, spans, places):
    return {
        (place, owner, i)
        for place in range(places)
        for owner, rows in line.at(place, spans).items()
        for first, end in rows
        for i in range(first, end)
    }


def test_what_is_put_on_the_line_is_found_by_place_and_by_owner():
    draw = random.Random(0)
    for _ in range(200):
        places, rows = draw.randint(1, 5), draw.randint(1, 6)
        line, held = Line(places, rows), drawn_everywhere(draw, places, rows) | {(0, 0, 0)}
        spans = on(line, held)
        assert spelled_out_everywhere(line, spans, places) == held
        by_owner = {owner: line.of(owner, spans) for owner in range(places)}
        for owner, found in by_owner.items():
            assert list(found) == sorted(found)
            for place, own in found.items():
                assert own == line.at(place, spans)[owner]
        assert sum(count(own) for found in by_owner.values() for own in found.values()) == len(held)
        assert set(line.pairs(spans).tolist()) == {place * places + owner for place, owner, _ in held}


def test_what_is_moved_is_held_by_another_place():
    draw = random.Random(1)
    for _ in range(200):
        places, rows = draw.randint(1, 5), draw.randint(1, 6)
        line, held = Line(places, rows), drawn_everywhere(draw, places, rows) | {(0, 0, 0)}
        to = np.array(draw.sample(range(places), places))
        moved = union(line.moved(on(line, held), to))
        assert spelled_out_everywhere(line, moved, places) == {(int(to[place]), owner, i) for place, owner, i in held}

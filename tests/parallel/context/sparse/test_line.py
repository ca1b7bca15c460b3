"""Rows of all owners at all places, on one line, against sets of (place, owner, row)."""

import random

import numpy as np

from parallel.context.sparse.line import Line
from parallel.context.sparse.rows import Spans, count, union

Held = set[tuple[int, int, int]]


def drawn(draw: random.Random, places: int, rows: int) -> Held:
    """What places hold; often the last row of one owner and the first of the next, which adjoin on no line."""
    everything = [(place, owner, i) for place in range(places) for owner in range(places) for i in range(rows)]
    share = draw.choice([0.1, 0.5, 1])
    return {one for one in everything if draw.random() < share}


def on(line: Line, held: Held) -> Spans:
    place, owner, row = (np.array(column, dtype=np.int64) for column in zip(*sorted(held), strict=True))
    return union(line.spans(place, owner, row, row + 1))


def spelled_out(line: Line, spans: Spans, places: int) -> Held:
    return {
        (place, owner, i)
        for place in range(places)
        for owner, rows in line.at(place, spans).items()
        for first, end in rows
        for i in range(first, end)
    }


def test_what_is_put_on_the_line_is_found_by_place_and_by_owner() -> None:
    draw = random.Random(0)
    for _ in range(200):
        places, rows = draw.randint(1, 5), draw.randint(1, 6)
        line, held = Line(places, rows), drawn(draw, places, rows) | {(0, 0, 0)}
        spans = on(line, held)
        assert spelled_out(line, spans, places) == held
        by_owner = {owner: line.of(owner, spans) for owner in range(places)}
        for owner, found in by_owner.items():
            assert list(found) == sorted(found)
            for place, own in found.items():
                assert own == line.at(place, spans)[owner]
        assert sum(count(own) for found in by_owner.values() for own in found.values()) == len(held)
        assert set(line.pairs(spans).tolist()) == {place * places + owner for place, owner, _ in held}


def test_what_is_moved_is_held_by_another_place() -> None:
    draw = random.Random(1)
    for _ in range(200):
        places, rows = draw.randint(1, 5), draw.randint(1, 6)
        line, held = Line(places, rows), drawn(draw, places, rows) | {(0, 0, 0)}
        to = np.array(draw.sample(range(places), places))
        moved = union(line.moved(on(line, held), to))
        assert spelled_out(line, moved, places) == {(int(to[place]), owner, i) for place, owner, i in held}

"""Every item is in one bin, none is too full, and few are needed."""

import random

from data.chat.convert import best_fit_decreasing


def naive(lengths, capacity):
    """The same rule, by looking at every bin."""
    bins = []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        rooms = [capacity - sum(lengths[i] for i in items) for items in bins]
        fits = [room for room in rooms if room >= lengths[item]]
        if fits:
            bins[rooms.index(min(fits))].append(item)
        else:
            bins.append([item])
    return bins


def test_bins_are_those_of_the_rule():
    draw = random.Random(0)
    for count in (0, 1, 7, 60):
        for capacity in (8, 100):
            lengths = [draw.randint(1, capacity) for _ in range(count)]
            bins = best_fit_decreasing(lengths, capacity)
            rooms = [sorted(lengths[i] for i in items) for items in bins]
            assert sorted(i for items in bins for i in items) == list(range(count))
            assert max((sum(room) for room in rooms), default=0) <= capacity
            want = [sorted(lengths[i] for i in items) for items in naive(lengths, capacity)]
            assert sorted(map(sum, rooms)) == sorted(map(sum, want))


def test_a_full_bin_has_no_padding():
    assert best_fit_decreasing([3, 6, 7, 4], 10) == [[0, 2], [1, 3]]

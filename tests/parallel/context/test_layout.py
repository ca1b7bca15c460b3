"""Layouts are bijections between (rank, local index) and position."""

import numpy as np
import pytest

from parallel.context.layout import LAYOUTS, ContextError, Layout, granularity, padded_length


@pytest.mark.parametrize("name", LAYOUTS)
def test_positions_ascend_and_each_is_owned_once(name):
    for size in range(1, 25):
        for team_size in (team for team in range(1, size + 1) if size % team == 0):
            layout = Layout(name, 3 * granularity(name, size, team_size), size, team_size)
            owned = [layout.positions(rank) for rank in range(size)]
            assert all((np.diff(positions) > 0).all() for positions in owned)
            assert all(
                [*layout.strides(rank)] == sorted(layout.strides(rank)) for rank in range(size)
            )
            assert len({len(positions) for positions in owned}) == 1
            np.testing.assert_array_equal(np.sort(np.concatenate(owned)), np.arange(layout.seq_len))


@pytest.mark.parametrize(
    ("name", "rank", "positions"),
    [
        ("contiguous", 1, [4, 5, 6, 7]),
        ("striped", 1, [1, 3, 5, 7]),
        ("zigzag", 1, [2, 3, 4, 5]),
        ("zigzag", 0, [0, 1, 6, 7]),
    ],
)
def test_the_three_layouts_on_eight_tokens(name, rank, positions):
    assert Layout(name, 8, 2).positions(rank).tolist() == positions


def test_lengths_are_padded_up_never_cut():
    assert padded_length("contiguous", 1001, 4) == 1004
    assert padded_length("zigzag", 1001, 4) == 1008
    assert padded_length("striped", 1000, 4) == 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("spiral", 8, 2), "spiral.*contiguous, striped, zigzag"),
        (("zigzag", 10, 4), "multiple of 8 tokens, but the sequence has 10; pad it to 16"),
        (("striped", 8, 4, 3), "team size 3 does not divide the context-parallel size 4"),
    ],
)
def test_what_cannot_work_is_refused(arguments, message):
    with pytest.raises(ContextError, match=message):
        Layout(*arguments)

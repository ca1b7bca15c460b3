"""Striped Attention's speed-ups.

Every printed maximum, the tiles of the paper, the planner's exact work.
"""

import pytest

from papers import rows, striped
from papers.ring import device

ROWS = rows.published("striped_speedups")


def test_every_printed_maximum_is_ours():
    assert len(ROWS) == 137
    for row in ROWS:
        ranks, tokens = int(row["sequence_parallel"]), int(row["seq_len"])
        shape = striped.model(row["model"]), ranks, tokens // ranks
        on_gpu = row["hardware"].startswith("A100")
        assert f"{striped.speedup(*shape, on_gpu):.2f}" == row["theoretical_max_speedup"], row
        other = striped.speedup(
            *shape, not on_gpu
        )  # the other device's cost of an attention's operation
        assert f"{other:.2f}" != row["theoretical_max_speedup"] or other > 1.8, row


def test_rows_of_a_device_take_turns_in_the_two_halves_and_both_have_losses():
    labels = striped.halves(ROWS)
    for hardware in striped.CHIPS:
        turns = [
            half for row, half in zip(ROWS, labels, strict=True) if row["hardware"] == hardware
        ]
        assert turns[0::2] == [striped.FITTED] * len(turns[0::2])
        assert turns[1::2] == [striped.HELD_OUT] * len(turns[1::2])
    losses = [
        half for row, half in zip(ROWS, labels, strict=True) if float(row["measured_speedup"]) < 1
    ]
    assert sorted(losses) == [striped.FITTED] * 5 + [striped.HELD_OUT] * 7


def test_tiles_are_computed_whole():
    """Section 3.2: at blocks of 4,096 the A100's tiles save nothing, a TPU's a quarter."""
    assert striped.computed_share(4096, striped.TILES["A100"]) == 1
    assert striped.computed_share(4096, striped.TILES["TPU"]) == 0.75
    assert striped.computed_share(1 << 20, striped.TILES["A100"]) == pytest.approx(0.5, abs=0.01)


def test_the_planner_has_what_the_maximum_leaves_where_sending_is_hidden():
    """Recomputation and the backward keep the ratio of attention to the rest roughly as it is."""
    row = next(row for row in ROWS if row["hardware"] == "TPUv4 x16" and row["seq_len"] == "524288")
    speedup = striped.planned(striped.model(row["model"]), device("TPU v4"), 2, 8, 524288)
    assert speedup == pytest.approx(float(row["theoretical_max_speedup"]), rel=0.03)

"""Striped Attention's speed-ups: every printed maximum, the tiles of the paper, the planner's exact work."""

from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

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
        other = striped.speedup(*shape, not on_gpu)  # the other device's cost of an attention's operation
        assert f"{other:.2f}" != row["theoretical_max_speedup"] or other > 1.8, row


def test_tiles_are_computed_whole():
    """Section 3.2: at blocks of 4,096 the A100's tiles save nothing, a TPU's a quarter."""
    assert striped.computed_share(4096, striped.TILES["A100"]) == 1
    assert striped.computed_share(4096, striped.TILES["TPU"]) == 0.75
    assert striped.computed_share(1 << 20, striped.TILES["A100"]) == pytest.approx(0.5, abs=0.01)


def test_emulated_ranks_gain_what_their_work_says(monkeypatch):
    """The ring's slowest of two ranks does 1.5 blocks, a striped one half of each of two: 1.5, if no product counts."""
    found = []
    for products in (0.0, 1e12):
        monkeypatch.setattr(
            striped, "clock", lambda *_, else_=products: lambda step, tiles: sum(tile.pairs for tile in tiles) or else_
        )
        found.append(striped.emulated("1B", 2, 65536)["emulated_speedup"])
    assert found == [pytest.approx(1.5, rel=1e-2), 1.0]


def test_a_jobs_figure_stands_beside_the_emulated_one(monkeypatch, tmp_path):
    row = next(row for row in striped.speedups() if row.job)
    here = replace(row, measured={"emulated_speedup": 1.4, "emulated_on": "a CPU"})
    monkeypatch.setattr(rows, "measured", lambda job, folder: {"speedup": 1.2, "on": "an A100"})
    assert rows._with_runs(here, tmp_path).measured == {**(here.measured or {}), "speedup": 1.2, "on": "an A100"}
    assert "a CPU" not in str(rows._with_runs(row, tmp_path).measured)


def test_what_emulated_ranks_time_is_a_layers_work(monkeypatch):
    """Forward, again, and backward: four products of the forward's operations."""
    counts = []

    def counted(step, tiles):
        with FlopCounterMode(display=False) as counter:
            step()
        counts.append(counter.get_total_flops())
        return 1.0

    monkeypatch.setattr(striped, "clock", lambda *_: counted)
    striped.emulated("1B", 2, 8192)
    rows, width, ffn, vocab = 256, 128, 344, 2000
    assert counts[:4] == [8 * rows * a * b for a, b in ((width, width), (width, ffn), (ffn, width), (width, vocab))]


def test_the_planner_has_what_the_maximum_leaves_where_sending_is_hidden():
    """Recomputation and the backward keep the ratio of attention to the rest roughly as it is."""
    row = next(row for row in ROWS if row["hardware"] == "TPUv4 x16" and row["seq_len"] == "524288")
    found = striped.planned(striped.model(row["model"]), device("TPU v4"), 2, 8, 524288)
    assert found == pytest.approx(float(row["theoretical_max_speedup"]), rel=0.03)

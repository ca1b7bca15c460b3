"""Striped Attention's speed-ups.

Every printed maximum, the tiles of the paper, the planner's exact work.
"""

import csv
from dataclasses import replace
from statistics import fmean

import pytest

from papers import rows, striped
from papers.ring import device
from tests.starts import ROOT

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
    assert speedup == pytest.approx(striped.predicted(row, device("TPU v4")))
    assert speedup == pytest.approx(float(row["theoretical_max_speedup"]), rel=0.03)


@pytest.mark.parametrize("hardware", striped.CHIPS)
def test_the_cost_of_masks_is_the_best_for_the_fitted_half(hardware):
    overhead = striped.MASK_OVERHEAD[hardware]
    smallest = striped.misfit(hardware, overhead)
    assert smallest < striped.misfit(hardware, overhead + 0.001)
    if overhead:
        assert smallest < striped.misfit(hardware, overhead - 0.001)


def test_tiles_and_masks_explain_the_rows_held_out():
    """Exact causal work alone is far off, and calls every loss a gain."""
    figures = {
        (row.hardware, row.labels["rows"]): row.analytic
        for row in striped.errors()
        if row.labels["rows"] == "all"
    }
    gpus = figures["A100-80GB x8", "all"]
    assert gpus["exact_off"] > 20
    assert gpus["exact_largest"] > 60
    assert gpus["tiles_off"] < gpus["exact_off"] / 2
    assert gpus["masks_held_out_off"] < 1.5
    assert abs(gpus["masks_held_out_largest"]) < 5
    assert gpus["losses"] == gpus["exact_losses_called_gains"] == 12
    assert gpus["tiles_losses_called_gains"] == gpus["masks_losses_called_gains"] == 0
    for (hardware, _), errors in figures.items():
        assert errors["masks_held_out_off"] < errors["exact_off"], hardware
        assert errors["masks_held_out_off"] < 4, hardware


def test_sends_that_are_not_hidden_explain_little_of_the_error_on_gpus():
    """Without any overlap, the mean error with whole tiles falls by less than half a point."""
    hardware = "A100-80GB x8"
    hidden = striped.tiled_kernel(hardware, 0.0)
    exposed = replace(hidden, posted_overlap=0.0)
    means = []
    for cluster in (hidden, exposed):
        errors = [
            abs(striped.predicted(row, cluster) / float(row["measured_speedup"]) - 1)
            for row in ROWS
            if row["hardware"] == hardware
        ]
        means.append(fmean(errors))
    assert 0 < means[0] - means[1] < 0.005


def test_errors_are_those_of_each_groups_rows():
    table = list(striped.speedups())
    groups = list(striped.errors())
    for hardware in striped.CHIPS:
        members = [row for row in table if row.hardware == hardware]
        for kind in ("all", "tokens per rank", "mesh"):
            counts = [
                row.analytic["count"]
                for row in groups
                if (row.hardware, row.labels["rows"]) == (hardware, kind)
            ]
            assert sum(counts) == len(members)
    worst = max(table, key=lambda row: striped.percent_error(row, striped.EXACT))
    mesh = worst.labels["mesh"].partition(" ")[2]
    group = next(row for row in groups if row.labels["value"] == mesh)
    assert group.analytic["exact_largest"] == striped.percent_error(worst, striped.EXACT)
    assert "a gain is predicted for 12, 0 and 0" in striped.summary(table)


def test_the_page_has_the_errors_of_the_results_file_row_by_row():
    page = (ROOT / "docs" / "evidence" / "prediction_errors.md").read_text(encoding="utf-8")
    with (rows.FOLDER / "results" / "striped_errors.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        table = list(csv.DictReader(file))
    pairs = ("exact", "tiles", "masks fitted", "masks held out")
    for row in table:
        hardware, _, chips = row["hardware"].replace("-80GB", "").rpartition(" ")
        if row["rows"] != "all" and hardware != "A100":
            continue
        title = f"{row['rows']} {row['value'] or row['analytic: count']}"
        if row["value"]:
            title += f": {row['analytic: count']}"
        if row["rows"] == "tokens per rank":
            title = f"{int(row['value']):,} tokens per rank: {row['analytic: count']}"
        cells = [
            f"{row[f'analytic: {name} off']}, {row[f'analytic: {name} largest']}" for name in pairs
        ]
        line = " | ".join([hardware.replace("TPUv", "TPU v"), title, *cells])
        assert f"| {line} |" in page, chips

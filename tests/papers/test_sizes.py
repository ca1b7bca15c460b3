"""Sizes that follow from counts: moments of AdamW, and diffusion transformers."""

import pytest

from papers import rows, sizes


def test_the_memory_that_smaller_moments_save_is_the_published_one():
    """Within a tenth: one source may mean GiB, 7 % more."""
    table = list(sizes.moments())
    assert len(table) == len(rows.published("moments")) == 3
    for row in table:
        assert abs(row.difference["saved_gb"]) < 0.1, row.labels
    assert sizes.moment_bytes("bf16") == 4
    # the larger moments would be far off
    halves = 630.8 * (sizes.moment_bytes("fp32") - sizes.moment_bytes("bf16")) / 1e3
    assert halves < 0.7 * table[0].published["saved_gb"]


def test_parameters_and_multiply_adds_of_dit_are_the_published_ones():
    table = list(sizes.dit())
    assert len(table) == 12
    for row in table:
        for name, off in row.difference.items():
            assert off == pytest.approx(0, abs=0.01), (row.labels, name)
    assert [row.labels["model"] for row in table][-1] == "DiT-XL/2"

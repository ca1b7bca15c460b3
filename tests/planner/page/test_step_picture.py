"""Pictures of a step: their bars fill the width in every detail, and a text says what is drawn."""

import pytest

from planner.page.spans import step_timeline
from planner.page.step_picture import BAR, step_section
from tests.planner.page.test_spans import H100, run_of


def bars_of(svg):
    """Return (start, width) in percent of the bars of each row, keyed by the row's top."""
    rows = {}
    for rect in svg.iter("rect"):
        if rect.get("height") == str(BAR):
            x, width = (float(rect.get(name).removesuffix("%")) for name in ("x", "width"))
            rows.setdefault(rect.get("y"), []).append((x, width))
    return rows


def check_widths(svg, num_rows):
    """Assert that the bars of every row follow each other and fill the picture."""
    rows = bars_of(svg)
    assert len(rows) == num_rows
    for bars in rows.values():
        end = 0.0
        for x, width in bars:
            assert x == pytest.approx(end, abs=3e-4)
            end = x + width
        assert end == pytest.approx(100, abs=3e-3)


CASES = {
    "tensor, offload": ("causes", 1600, "A pass lists its causes"),
    "pipeline 4 x context 8": ("passes", 1600, "F0 is the forward pass"),
    "interleaved": ("causes", 1600, "cost model counts the bubble of Interleaved1F1B"),
    "pipeline 4 x context 8 ": ("runs", 10, "Passes that follow each other"),
}


@pytest.mark.parametrize("name", CASES)
def test_bars_of_every_row_fill_the_picture(name):
    detail, max_passes, sentence = CASES[name]
    estimate, _ = run_of(name.strip())
    timeline = step_timeline(estimate, H100)
    sections = step_section(timeline, "1", max_passes)
    texts = ["".join(section.itertext()) for section in sections]
    assert any(sentence in text for text in texts)
    pictures = [section for section in sections if section.tag == "svg"]
    check_widths(pictures[0], len(timeline.rows))
    if detail == "causes":
        assert len(pictures) == 1
    else:
        first_rows = [row for row in timeline.rows if row.stage == 0]
        check_widths(pictures[1], len(first_rows))


def test_a_picture_with_a_missing_bar_is_noticed():
    estimate, _ = run_of("tensor, offload")
    sections = step_section(step_timeline(estimate, H100), "1")
    svg = next(section for section in sections if section.tag == "svg")
    check_widths(svg, 1)
    svg.remove(next(svg.iter("rect")))
    with pytest.raises(AssertionError):
        check_widths(svg, 1)

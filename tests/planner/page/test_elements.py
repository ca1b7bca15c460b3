"""Elements of the page: escaped, well-formed, told apart without colour, and readable if narrow."""

import pytest

from planner.page.elements import (
    CHARACTER,
    FILLS,
    WIDTHS,
    bar,
    document,
    element,
    label,
    picture,
    table,
    without_empty,
)
from planner.page.origins import FORMULAS
from planner.page.passes import SENDS, SLOWER
from planner.page.spans import BUBBLE
from planner.page.step_picture import ranges
from planner.recorder import CAUSES
from tests.planner.page.pages import Page, check_alone

HOSTILE = "</table><script>alert('&\"')</script>"


def test_names_of_users_are_escaped_everywhere():
    sections = [
        element("p", HOSTILE),
        table([["", HOSTILE], [HOSTILE, "1"]], "one"),
        picture([bar(0, 1, HOSTILE, HOSTILE, 0, 10), *label(0, 1, [HOSTILE], 10)], 10, HOSTILE),
    ]
    text = document(HOSTILE, sections)
    assert "<script" not in text
    page = Page(text)
    check_alone(page)
    assert page.tables["one"] == [["", HOSTILE], [HOSTILE, "1"]]
    # Title, heading, paragraph; 2 cells; in the picture its title, the bar's, and 3 labels.
    assert "".join(page.texts).count(HOSTILE) == 10


def test_a_broken_page_is_noticed():
    whole = document("title", [table([["a"], ["b"]], "one")])
    Page(whole)
    for wrong in (whole.replace("</td>", ""), whole.replace("</table>", "</table></table>")):
        with pytest.raises(AssertionError):
            Page(wrong)
    twice = document("title", [table([["a"], ["b"]], "one"), table([["a"], ["b"]], "one")])
    with pytest.raises(AssertionError):
        check_alone(Page(twice))


def gray(colour):
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


STEP = (*FORMULAS, SENDS, BUBBLE, SLOWER)
MEMORY = (*CAUSES, "left for fragmentation")
TOGETHER = {
    "a step": STEP,
    "passes": ("forward", "backward", "passes", "wait for other stages", "data parallel"),
    "counted memory": (
        "weights, gradients, optimizer",
        "activations",
        "a layer's backward, or the logits",
        "left for fragmentation",
    ),
    "rehearsed memory": MEMORY,
    "measured": ("compute", "exposed sends and waits", "copies", "data", "saving", "other"),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_fills_of_a_picture_differ_in_black_and_white(name):
    fills = [FILLS[cause] for cause in TOGETHER[name]]
    for index, first in enumerate(fills):
        for second in fills[:index]:
            is_apart = abs(gray(first.colour) - gray(second.colour)) > 25
            assert is_apart or (first.path, first.width) != (second.path, second.width)


def test_a_label_stands_only_where_it_fits():
    texts = ["attention 269.8 ms", "attention", "att"]
    for share in (0.01, 0.05, 0.1, 0.3, 1.0):
        labels = {node.get("class").split()[1]: node.text for node in label(0, share, texts, 10)}
        for width_class, pixels in WIDTHS.items():
            room = share * pixels
            fitting = [text for text in texts if len(text) * CHARACTER + 8 <= room]
            assert labels.get(width_class) == (fitting[0] if fitting else None)
    assert label(0, 0.01, texts, 10) == []


def test_ranks_are_written_as_ranges():
    assert ranges([0, 1, 2, 3]) == "0 to 3"
    assert ranges([0, 2, 3, 8]) == "0, 2 to 3, 8"
    assert ranges(range(0, 40, 2)) == "0, 2, 4, 6, 8, ..."


def test_empty_columns_of_a_table_are_left_out():
    assert without_empty([["", "a", "b"], ["1", "", "x"], ["2", "", ""]]) == [
        ["", "b"],
        ["1", "x"],
        ["2", ""],
    ]

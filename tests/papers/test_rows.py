"""Tables row by row.

Differences, columns, files, and what the commands say of a wrong or unmeasurable table.
"""

from dataclasses import replace

import pytest

from papers import ring
from papers.pictures import draw
from papers.rows import sheets_of, stamp, write
from papers.table import TableRow, as_csv, flat, made_by

ROWS = [
    TableRow({"model": "1B"}, {"speedup": 2.0, "gain": None}, {"speedup": 2.5}, "a GPU"),
    TableRow({"model": "3B"}, {"gain": 1}, {}, "a GPU", {"bytes": 8}),
]


def test_what_is_published_and_predicted_is_compared():
    assert ROWS[0].difference == {"speedup": 0.25}
    assert ROWS[1].difference == {}
    head, cells = flat(ROWS)
    assert head[:4] == ["model", "published: speedup", "published: gain", "analytic: speedup"]
    assert head[4:] == ["measured: bytes", "difference: speedup"]
    assert cells == [["1B", 2.0, None, 2.5, None, 0.25], ["3B", None, 1, None, 8, None]]
    assert as_csv(ROWS, "a commit").splitlines()[1] == "1B,2,,2.5,,0.25,a commit"


@pytest.mark.parametrize("models", [2, 12])
def test_no_two_lines_of_a_picture_have_one_colour(models):
    labels = [
        (card, model, tokens) for card in "AB" for model in range(models) for tokens in (1, 2)
    ]
    rows = [
        TableRow(
            {"card": card, "model": f"{model}B", "tokens": tokens},
            {"time": 1.0},
            {"time": 2.0, "hidden": 3.0},
            "",
        )
        for card, model, tokens in labels
    ]
    figures = {"time": "time", "-": "hidden"}
    curves = {"x": "tokens", "figures": figures, "panel": "card", "curve": "model", "label": "s"}
    for axes in draw(curves, rows).axes:
        lines = [line for line in axes.get_lines() if line.get_linestyle() == "-"]
        assert (
            len({line.get_color() for line in lines})
            == len({line.get_label() for line in lines})
            == 2 * models
        )


def test_files_are_written_and_what_cannot_be_measured_is_said(tmp_path, capsys):
    assert ring.main(["--table", "flops", "--results", str(tmp_path), "--measure"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ring_flops.csv", "ring_flops.png"]
    shown = capsys.readouterr()
    assert "appendix C" in shown.out
    assert "flops is only predicted, not measured: it needs no run" in shown.err
    assert made_by((tmp_path / "ring_flops.csv").read_text()).startswith(stamp()["commit"])


OLD = "0123abc, 2026-01-02"


@pytest.mark.parametrize(
    ("printed", "measured", "message", "unchanged"),
    [
        ("149.5", None, "equal, kept", True),
        ("149.6", None, "written anew, since figures differ", False),
        ("149.6", {"block": 2.0}, "kept, since the new rows lack its measured figures", True),
    ],
)
def test_equal_files_and_those_with_more_measured_figures_stay(
    tmp_path, capsys, printed, measured, message, unchanged
):
    sheet = sheets_of("ring", ring.TABLES)[1]["minimal_block"]
    rows = list(sheet.rows())
    before = as_csv([replace(rows[0], measured=measured), *rows[1:]], OLD).replace("149.5", printed)
    (tmp_path / "one.csv").write_text(before)
    write(tmp_path / "one", sheet, rows)
    after = (tmp_path / "one.csv").read_text()
    assert f"one.csv was made by {OLD}: {message}" in capsys.readouterr().err
    assert (after == before) == (made_by(after) == OLD) == unchanged
    others = [
        rows[0],
        *(replace(row, measured={"other": 3.0}) for row in rows[1:]),
    ]  # more, but not that one
    write(tmp_path / "one", sheet, others)
    assert ((tmp_path / "one.csv").read_text() == before) == bool(measured)


def test_an_unknown_table_lists_those_there_are(capsys):
    assert ring.main(["--table", "nothing"]) == 2
    assert "minimal_block" in (printed := capsys.readouterr().err)
    assert printed.count("\n") == 1

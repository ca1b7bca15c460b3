"""Tables row by row: differences, columns, files, and what the commands say of a wrong or unmeasurable table."""

import json
from dataclasses import replace

import pytest

from papers import ring
from papers.rows import Curves, Row, as_csv, draw, flat, made_by, sheets_of, stamp, write

ROWS = [
    Row({"model": "1B"}, {"speedup": 2.0, "gain": None}, {"speedup": 2.5}, "a GPU"),
    Row({"model": "3B"}, {"gain": 1}, {}, "a GPU", {"bytes": 8}),
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
@pytest.mark.parametrize("figures", [{"time": "time"}, {"time": "time", "-": "time_hidden"}])
def test_no_two_lines_of_a_picture_have_one_colour(figures, models):
    rows = [
        Row(
            {"card": card, "model": f"{model}B", "tokens": tokens}, {"time": 1.0}, {"time": 2.0, "time_hidden": 3.0}, ""
        )
        for card in ("A", "B")
        for model in range(models)
        for tokens in (1, 2)
    ]
    curves = Curves(x="tokens", figures=figures, panel="card", curve="model", label="s")
    for axes in draw(curves, rows).axes:
        lines = [line for line in axes.get_lines() if line.get_linestyle() == "-"]
        assert len({line.get_color() for line in lines}) == len({line.get_label() for line in lines}) == len(lines)
        assert len(lines) == models * len(figures)


def test_json_has_every_row_with_its_source(capsys):
    assert ring.main(["--table", "minimal_block", "--json", "--measure"]) == 0
    shown = capsys.readouterr()
    data = json.loads(shown.out)
    assert len(data) == 5
    assert data[1]["published"] == {"block": 24.5, "sequence": 149.5}
    assert data[1]["measured"] is None
    assert "table 2" in data[1]["source"]
    assert data[1]["hardware"] == "A100 InfiniBand"
    assert "minimal_block is not measured, but predicted" in shown.err


def test_files_are_written(tmp_path, capsys):
    assert ring.main(["--table", "flops", "--results", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ring_flops.csv", "ring_flops.png"]
    assert "appendix C" in capsys.readouterr().out
    assert made_by(tmp_path / "ring_flops.csv").startswith(stamp()["commit"])


@pytest.mark.parametrize("changed", [False, True])
def test_equal_files_stay_those_of_the_commit_that_made_them(tmp_path, capsys, changed):
    given = ["--table", "minimal_block", "--results", str(tmp_path)]
    assert ring.main(given) == 0
    table = tmp_path / "ring_minimal_block.csv"
    table.write_text(table.read_text().replace(made_by(table), "0123abc, 2026-01-02"))
    if changed:
        table.write_text(table.read_text().replace("149.5", "149.6"))
    assert ring.main(given) == 0
    said = capsys.readouterr().err
    assert f"{table} was made by 0123abc, 2026-01-02: {'other' if changed else 'equal'}" in said
    assert (made_by(table) == "0123abc, 2026-01-02") == (not changed)


def test_measured_figures_are_not_lost(tmp_path, capsys):
    sheet = sheets_of("ring", ring.TABLES)[1]["minimal_block"]
    rows = list(sheet.rows())
    write(tmp_path / "one", sheet, [replace(rows[0], measured={"block": 2.0}), *rows[1:]])
    before = (tmp_path / "one.csv").read_text()
    write(tmp_path / "one", sheet, rows)
    assert "measured figures that are not there now, kept" in capsys.readouterr().err
    assert (tmp_path / "one.csv").read_text() == before
    others = [rows[0], *(replace(row, measured={"emulated": 3.0}) for row in rows[1:])]  # more, but not that one
    write(tmp_path / "one", sheet, others)
    assert (tmp_path / "one.csv").read_text() == before
    write(tmp_path / "one", sheet, [replace(row, measured={"block": 3.0}) for row in rows])
    assert "written anew" in capsys.readouterr().err
    assert (tmp_path / "one.csv").read_text() != before


def test_an_unknown_table_lists_those_there_are(capsys):
    assert ring.main(["--table", "nothing"]) == 2
    assert "minimal_block" in (said := capsys.readouterr().err)
    assert said.count("\n") == 1

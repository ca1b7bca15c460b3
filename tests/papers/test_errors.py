"""Errors of the predictions by table: which figures are compared, and what the page's file has."""

import csv

import pytest

from papers import errors, striped
from papers.rows import FOLDER
from papers.table import TableRow, as_csv, made_by
from tests.starts import ROOT

RESULT = FOLDER / "results" / "errors_all.csv"
PAGE = ROOT / "docs" / "evidence" / "prediction_errors.md"
STRIPED = {
    "theoretical max": "theoretical maximum",
    "speedup": "speed-up by a formula, tiles",
    "by the planner": "speed-up by the planner, visible pairs only",
    "by the planner with tiles and masks": "speed-up by the planner, tiles and masks",
}
"""Names on the page of Striped Attention's figures."""
WITHOUT_NUMBERS = {
    ("lasp", "convergence"),
    ("records", "upipe"),
    ("ring", "rl"),
    ("striped", "errors"),
    ("wallfacer", "links"),
    ("wallfacer", "supported_length"),
}


def test_only_numbers_are_compared_and_each_figure_by_itself():
    members = [
        TableRow({}, {"speedup": 2.0, "gb": "OOM"}, {"speedup": 3.0, striped.EXACT: 1.0}, ""),
        TableRow({}, {"speedup": 4.0, "gb": 8.0}, {"speedup": 3.0, "gb": 10.0}, ""),
    ]
    assert errors.differences_of(members) == {
        "speedup": [0.5, -0.25],
        striped.EXACT: [-0.5],
        "gb": [0.25],
    }


def test_a_published_integer_is_compared():
    members = [TableRow({}, {"speedup": 2}, {striped.MASKED: 3}, "")]
    assert errors.differences_of(members) == {striped.MASKED: [0.5]}


def test_fitted_figures_are_listed_by_half(monkeypatch):
    def rows_of():
        for half, predicted in (("fitted", 1.1), ("held out", 1.5), ("held out", 0.7)):
            yield TableRow({"half": half}, {"seconds": 1.0}, {"seconds": predicted}, "")

    monkeypatch.setattr(errors, "PAPERS", {"records": {"float8": rows_of}})
    listed = [(row.labels["half"], row.analytic) for row in errors.all_errors()]
    assert listed == [
        ("fitted", {"rows": 1, "off_percent": 10.0, "largest_percent": 10.0}),
        ("held out", {"rows": 2, "off_percent": 40.0, "largest_percent": 50.0}),
    ]
    monkeypatch.setattr(errors, "FITTED_FIGURES", set())
    assert [row.analytic["rows"] for row in errors.all_errors()] == [3]


def cells_of(heading):
    """Return the rows of the first table below a heading of the page, without its head."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def result(name):
    with (FOLDER / "results" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_page_has_the_rows_of_the_table_of_all_errors():
    expected = []
    for row in result("errors_all.csv"):
        figure = row["figure"]
        if row["paper"] == "striped":
            figure = STRIPED[figure]
        figures = [row[f"analytic: {name}"] for name in ("rows", "off percent", "largest percent")]
        expected.append([f"`{row['paper']}`: `{row['table']}`", figure, row["half"], *figures])
    assert cells_of("All tables") == expected


def test_the_tables_of_the_file_are_those_with_numbers_to_compare():
    """The others have words or nothing published; the slow test computes them all."""
    listed = {(row["paper"], row["table"]) for row in result("errors_all.csv")}
    names = {(paper, name) for paper, tables in errors.PAPERS.items() for name in tables}
    assert names - listed == WITHOUT_NUMBERS


def test_the_page_has_the_rows_of_the_table_of_float8():
    expected = []
    for row in result("records_float8.csv"):
        published, predicted = float(row["published: seconds"]), float(row["analytic: seconds"])
        cards = {"h100_500w": "H100 of 96 GB", "h200_pod": "H200"}[row["cluster"]]
        percent = f"{100 * (predicted / published - 1):.1f}".replace(".0", "")
        labels = [row["half"], f"{row['gpus']} {cards}", f"{int(row['tokens']):,}"]
        labels += [row["matmuls"], row["cp"]]
        figures = [row["published: seconds"], row["analytic: seconds"], percent]
        expected.append(labels + figures)
    assert cells_of("Float8 and context parallelism") == expected


@pytest.mark.slow
def test_the_pages_file_is_what_the_tables_predict():
    text = RESULT.read_text(encoding="utf-8")
    assert as_csv(list(errors.all_errors()), made_by(text)) == text

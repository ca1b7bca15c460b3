"""Errors of the predictions by table: which figures are compared, and what the page's file has."""

import csv

import pytest

from papers import errors, striped
from papers.rows import FOLDER
from papers.table import TableRow, as_csv, made_by

RESULT = FOLDER / "results" / "errors_all.csv"


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


def test_the_page_has_a_row_of_every_table_that_compares_numbers():
    with RESULT.open(encoding="utf-8", newline="") as file:
        listed = {(row["paper"], row["table"]) for row in csv.DictReader(file)}
    table_names = {(paper, name) for paper, tables in errors.PAPERS.items() for name in tables}
    assert listed < table_names
    assert ("striped", "speedups") in listed


@pytest.mark.slow
def test_the_pages_file_is_what_the_tables_predict():
    text = RESULT.read_text(encoding="utf-8")
    assert as_csv(list(errors.all_errors()), made_by(text)) == text

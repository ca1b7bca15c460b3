"""Tables from columns as data, and results as lines that are read back as they were."""

import json

import pytest

from tools.common.report import Table, as_csv, lines_of, read_records, write_records

RESULT = {
    "benchmark": "of nothing",
    "machine": {"cores": 2},
    "skipped": {},
    "rows": [{"name": "a", "seconds": [1.0, 2.0]}, {"name": "b", "seconds": []}],
    "ratios": {"a/b": {"ratio": 1 / 3}, "b/a": {"ratio": 3.0}},
}


def test_a_row_is_a_line_and_all_of_it_comes_back(tmp_path):
    write_records(tmp_path / "new" / "x.jsonl", RESULT)
    lines = (tmp_path / "new" / "x.jsonl").read_text().splitlines()
    assert [json.loads(line).get("of") for line in lines] == [
        None,
        "rows",
        "rows",
        "ratios",
        "ratios",
    ]
    assert json.loads(lines[3]) == {"of": "ratios", "key": "a/b", "ratio": 0.333333333333}
    records = read_records(tmp_path / "new" / "x.jsonl")
    assert records == RESULT | {"ratios": {"a/b": {"ratio": 0.333333333333}, "b/a": {"ratio": 3.0}}}


def test_a_table_is_columns_of_data():
    rows = [{"name": "a", "s": 1.25, "of": [1, 2]}, {"name": "long", "s": None}]
    columns = {
        "": "{name}",
        "s": "{s:.1f}",
        "x s": lambda row: row["s"] and 2 * row["s"],
        "[1]": "{of[1]}",
    }
    table = Table(columns, rows)
    assert table.text() == ["        s  x s  [1]", "a     1.2  2.5    2", "long"]
    assert table.markdown("---:")[1:] == [
        "| ---: | ---: | ---: | ---: |",
        "| a | 1.2 | 2.5 | 2 |",
        "| long |  |  |  |",
    ]
    assert table.line(rows[0]) == "a: s 1.2, x s 2.5, [1] 2"
    assert as_csv(["a", "b"], [[1 / 3, None], ["x,y", 2]]) == 'a,b\n0.333333,\n"x,y",2\n'


def test_what_could_not_be_read_back_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a row of rows has a field 'of'"):
        lines_of({"rows": [{"of": 1}]})
    path = tmp_path / "x.jsonl"
    for text, message in (
        ('{"a": 1}\n{"b"', r"x\.jsonl:2 is not JSON"),
        ('{"a": 1}\n{"b": 2}', r"x\.jsonl:2 is not a row"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_records(path)

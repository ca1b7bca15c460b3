"""The delta rule over the link: what crosses is what the formula says, and a rank that computes else is told."""

import pytest

from bench.harness import MeasureError
from bench.link import delta
from tests.bench.link.test_link import permitted
from tools.common.report import read_records

SHAPE = ["--tokens", "100", "--head-dim", "16", "--repeats", "1", "--rate", "400mbit"]


@permitted
def test_what_crosses_is_what_the_formula_says(tmp_path, capsys):
    assert delta.main([*SHAPE, "--results", str(tmp_path)]) == 0, capsys.readouterr().err
    (path,) = tmp_path.glob("link-delta-*.jsonl")
    found = read_records(path)
    assert [row["name"] for row in found["rows"]] == ["states", "heads", "gather"]
    for row in found["rows"]:
        assert row["by_formula"] == delta.by_formula(row["name"], 100, 4, 16)
        assert row["by_formula"] < row["crossed"] <= 1.1 * row["by_formula"] + (1 << 14)
    assert path.with_suffix(".md").read_text().count(">= 2.0: ") == 2


def test_formulas_are_those_of_a_hand_count():
    assert delta.by_formula("states", 8192, 4, 128) == 4 * 128 * 128 * 4
    assert delta.by_formula("heads", 8192, 4, 128) == 8192 * (2 * 2 * 128 + 2 * 4 * 128 + 2 * 4) * 4
    assert delta.by_formula("gather", 8192, 4, 128) == 2 * 8192 * (2 * 2 * 128 + 4 * 128 + 2 * 4) * 4


@permitted
def test_a_rank_that_computes_something_else_is_told(monkeypatch):
    sums = delta.fingerprint
    monkeypatch.setattr(delta, "fingerprint", lambda tensors: 1.01 * sums(tensors))
    with pytest.raises(MeasureError, match="states computes something else"):
        delta.measure(delta.build_parser().parse_args(SHAPE))

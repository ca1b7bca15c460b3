"""The attention alone over the link: what crosses is what the plan says; verdicts by hand."""

import pytest

from bench.harness import MeasureError
from bench.link import attention
from bench.link.attention import contestants, verdict, work_of
from bench.link.network import Network
from tests.bench.link.test_link import permitted
from tools.common.report import read_records

SHAPE = {"seq_length": 2048, "num_heads": 8, "head_dim": 16}
NETWORK = Network(rails=False)  # not entered: its numbers of ranks alone


def crossing(case, name):
    work = work_of(case, **SHAPE)
    contestant = next(
        crossing_contestant
        for crossing_contestant in contestants(work, list(attention.METHODS))
        if crossing_contestant.name == name
    )
    return attention.crossing(contestant, work, NETWORK)


@pytest.mark.slow
@permitted
def test_what_crosses_is_what_the_plan_says(tmp_path, capsys):
    shape = ["--seq-length", "2048", "--head-dim", "16", "--repeats", "1", "--rate", "400mbit"]
    flags = ["--cases", "lognormal", "--methods", "ring", "--results", str(tmp_path)]
    assert attention.main([*shape, *flags]) == 0, capsys.readouterr().err
    (path,) = tmp_path.glob("link-attention-*.jsonl")
    result = read_records(path)
    names = [(row["name"], row["all_rows"]) for row in result["attentions"]]
    assert names == [("exchange", False), ("ring all rows", True), ("ring", False)]
    for row in result["attentions"]:
        assert row["attention_by_plan"] == crossing("lognormal", row["name"])
        assert (
            row["attention_by_plan"] < row["crossed"] <= 1.1 * row["attention_by_plan"] + (1 << 15)
        )
        assert (
            row["median"] > 0.8 * row["crossed"] * 8 / 400e6 - 8 * (128 << 10) / 400e6
        )  # but for one burst
    assert "times as fast as ring all rows" in path.with_suffix(".md").read_text()


@pytest.mark.slow
@permitted
def test_a_rank_that_computes_something_else_is_told(monkeypatch):
    sums = attention.fingerprint
    monkeypatch.setattr(attention, "fingerprint", lambda tensors: 1.01 * sums(tensors))
    flags = ["--seq-length", "256", "--cases", "one", "--methods", "ring"]
    with pytest.raises(MeasureError, match="exchange does not compute the same"):
        attention.measure(attention.build_parser().parse_args(flags))


def test_all_rows_are_those_of_one_document_and_less_crosses_where_queries_see_less():
    for name in ("ring", "zigzag", "double_ring", "wallfacer_c2"):
        whole = crossing("one", name)
        assert crossing("short", f"{name} all rows") == whole
        assert crossing("short", name) < 0.6 * whole
    kv = 2 * 2048 * 2 * 16 * 4
    assert (
        crossing("one_grouped", "ring") == kv * 22 // 8
    )  # as in test_link: 7 of 8 parts twice, and 8 of gradients
    assert crossing("one_grouped", "exchange") * 4 == crossing("one", "exchange")


def test_a_verdict_names_the_best_of_both_kinds():
    rows = [
        {"name": name, "all_rows": all_rows, "median": median, "on_link": on_link}
        for name, all_rows, median, on_link in (
            ("exchange", False, 1.0, 0.9),
            ("ring all rows", True, 9.0, 0.6),
            ("ulysses", True, 10.0, 0.9),
            ("ring", False, 0.5, 0.1),
        )
    ]
    judged = verdict("short", rows)
    assert (judged["ratio"], judged["met"]) == (9.0, True)
    assert (judged["best"], judged["against_best"]) == ("ring", 0.5)
    figures = {"case": "short", "unlimited": 0.1, "crossed": 1 << 20, "attention_by_plan": 1 << 20}
    about = {"mask": "causal", "kv_heads": 8}
    result = {"link": "shared", "workload": SHAPE, "verdicts": {"short": about | judged}}
    text = "\n".join(attention.markdown(result | {"attentions": [row | figures for row in rows]}))
    assert (
        "as ring all rows, the best that sends all rows >= 8.0: 9.000, met; as ring, the best "
        "of all others: 0.50"
    ) in text
    assert text.index("| ring |") < text.index("| exchange |") < text.index("| ring all rows |")

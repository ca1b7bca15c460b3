"""Attention and the delta rule alone over the link: what crosses is what plan and formula say; verdicts by hand."""

import pytest

from bench.harness import MeasureError
from bench.link import attention, delta
from bench.link.attention import contestants, verdict, work_of
from bench.link.network import Network
from bench.link.ranks import plan_crossing
from tests.bench.link.test_link import permitted
from tools.common.report import read_records

SHAPE = {"seq_length": 2048, "num_heads": 8, "head_dim": 16}
NETWORK = Network(rails=False)  # not entered: its numbers of ranks alone


def crossing(case, name):
    work = work_of(case, **SHAPE)
    contestant = next(one for one in contestants(work, list(attention.METHODS)) if one.name == name)
    sizes = {"batch": 1, "heads": 8, "kv_heads": work.kv_heads, "head_dim": 16, "element_size": 4}
    return max(plan_crossing(contestant.plan(work, NETWORK), 4, **sizes))


@pytest.mark.slow
@permitted
def test_what_crosses_is_what_the_plan_says(tmp_path, capsys):
    shape = ["--seq-length", "2048", "--head-dim", "16", "--repeats", "1", "--rate", "400mbit"]
    asked = ["--cases", "lognormal", "--methods", "ring", "--results", str(tmp_path)]
    assert attention.main([*shape, *asked]) == 0, capsys.readouterr().err
    (path,) = tmp_path.glob("link-attention-*.jsonl")
    result = read_records(path)
    assert [(row["name"], row["all_rows"]) for row in result["attentions"]] == [
        ("exchange", False),
        ("ring all rows", True),
        ("ring", False),
    ]
    for row in result["attentions"]:
        assert row["attention_by_plan"] == crossing("lognormal", row["name"])
        assert row["attention_by_plan"] < row["crossed"] <= 1.1 * row["attention_by_plan"] + (1 << 15)
        assert row["median"] > 0.8 * row["crossed"] * 8 / 400e6 - 8 * (128 << 10) / 400e6  # but for one burst
    assert result["verdicts"]["lognormal"]["best_of_all_rows"] == "ring all rows"
    assert "exchange is " in path.with_suffix(".md").read_text()
    assert max(map(len, path.read_text().splitlines())) < 1000


@permitted
@pytest.mark.parametrize(
    ("bench", "flags", "name"),
    [
        (attention, ["--seq-length", "256", "--cases", "one", "--methods", "ring"], "exchange"),
        (delta, ["--tokens", "100", "--head-dim", "16"], "states"),
    ],
)
def test_a_rank_that_computes_something_else_is_told(bench, flags, name, monkeypatch):
    sums = bench.fingerprint
    monkeypatch.setattr(bench, "fingerprint", lambda tensors: 1.01 * sums(tensors))
    with pytest.raises(MeasureError, match=f"{name} computes something else"):
        bench.measure(bench.build_parser().parse_args(flags))


def test_all_rows_are_those_of_one_document_and_less_crosses_where_queries_see_less():
    for name in ("ring", "zigzag", "double_ring", "wallfacer_c2"):
        whole = crossing("one", name)
        assert crossing("short", f"{name} all rows") == whole
        assert crossing("short", name) < 0.6 * whole
    kv = 2 * 2048 * 2 * 16 * 4
    assert crossing("one_grouped", "ring") == kv * 22 // 8  # as in test_link: 7 of 8 parts twice, and 8 of gradients
    assert crossing("one_grouped", "exchange") * 4 == crossing("one", "exchange")


def test_a_verdict_names_the_best_of_both_kinds():
    rows = [
        {"name": "exchange", "all_rows": False, "median": 1.0, "on_link": 0.9},
        {"name": "ring all rows", "all_rows": True, "median": 9.0, "on_link": 0.6},
        {"name": "ulysses", "all_rows": True, "median": 10.0, "on_link": 0.9},
        {"name": "ring", "all_rows": False, "median": 0.5, "on_link": 0.1},
    ]
    assert verdict("short", rows) == {
        "best_of_all_rows": "ring all rows",
        "times_as_fast": 9.0,
        "asked": 8.0,
        "met": True,
        "on_link": 0.6,
        "link_bound": False,
        "best": "ring",
        "times_as_fast_as_best": 0.5,
    }
    figures = {"case": "short", "unlimited": 0.1, "crossed": 1 << 20, "attention_by_plan": 1 << 20}
    result = {"ranks_per_node": 4, "rate": "1mbit", "repeats": 1, "link": "shared", "workload": SHAPE, "note": None}
    result |= {"machine": dict.fromkeys(("device", "cores", "platform", "torch", "date"), "x"), "load_average": [1.0]}
    result |= {"masks": {"short": {"said": "causal", "kv_heads": 8}}, "verdicts": {"short": verdict("short", rows)}}
    text = attention.markdown({**result, "attentions": [row | figures for row in rows]})
    assert (
        "which spends 60% of its time on the link, too little: give a lower --rate; 0.50 times as fast as ring" in text
    )
    assert text.index("| ring |") < text.index("| exchange |") < text.index("| ring all rows |")


@pytest.mark.parametrize("rate", ["100", "0mbit", "12mbps", "fast"])
def test_a_rate_in_other_words_is_refused(rate, capsys):
    assert attention.main(["--rate", rate]) == 1
    assert capsys.readouterr().err == (
        f"error: --rate is {rate!r}; give a number with kbit, mbit or gbit, such as 100mbit\n"
    )


DELTA = ["--tokens", "100", "--head-dim", "16", "--repeats", "1", "--rate", "400mbit"]


@permitted
def test_what_crosses_of_the_delta_rule_is_what_the_formula_says(tmp_path, capsys):
    assert delta.main([*DELTA, "--results", str(tmp_path)]) == 0, capsys.readouterr().err
    (path,) = tmp_path.glob("link-delta-*.jsonl")
    found = read_records(path)
    assert [row["name"] for row in found["rows"]] == ["states", "gather"]
    for row in found["rows"]:
        assert row["by_formula"] == delta.by_formula(row["name"], 100, 4, 16)
        assert row["by_formula"] < row["crossed"] <= 1.1 * row["by_formula"] + (1 << 14)
    assert path.with_suffix(".md").read_text().count(">= 2.0: ") == 1


def test_formulas_are_those_of_a_hand_count():
    assert delta.by_formula("states", 8192, 4, 128) == 4 * 128 * 128 * 4
    assert delta.by_formula("gather", 8192, 4, 128) == 2 * 8192 * (2 * 2 * 128 + 4 * 128 + 2 * 4) * 4

"""The bench of the delta rule: what it compares, and what it reports."""

import pytest

from bench import delta
from tools.common.report import read_records

pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5", reason="needs transformers")
SHAPE = ["--num-heads", "2", "--head-dim", "16", "--min-length", "64", "--max-length", "130", "--repeats", "2"]


def test_the_command_writes_figures(tmp_path, capsys):
    assert delta.main([*SHAPE, "--max-seconds", "0.01", "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("delta-*.jsonl")
    found = read_records(path)
    assert [(row["length"], row["name"]) for row in found["rows"]] == [
        (length, name) for length in (64, 128) for name in delta.CONTESTANTS
    ]
    assert [row["name"] for row in found["shared"]] == ["one process", "2 processes"]
    said = capsys.readouterr().out
    assert delta.markdown(found) in said
    assert said.count(">= 3.0") == said.count("<= 0.62") == 1


def test_something_else_is_not_timed(monkeypatch, tmp_path, capsys):
    ours = delta.ours
    monkeypatch.setattr(delta, "ours", lambda *x: 2 * ours(*x))
    assert delta.main([*SHAPE, "--results", str(tmp_path)]) == 1
    assert "chunked computes something else than transformers" in capsys.readouterr().err

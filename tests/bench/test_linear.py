"""The bench of linear attention: what it counts, compares and reports."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import linear
from bench.linear import LABELS, exponent, fits, flops, lengths_between, main, markdown, overtakes
from kernels import linear_attention, linear_scan
from tools.common.report import read_records
from tools.common.shapes import AttentionShape


def sized(length):
    return AttentionShape(seq_length=length, num_heads=4, kv_heads=4, head_dim=32)


def counted(step):
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def chunked_outside_of_its_operator(work):
    """The counter does not look into an operator, so what runs in it is called by itself."""
    q, k, v, dout = work.tensors()
    rates = (-0.1, -0.2, -0.3, -0.4)
    linear_scan.scan(q, k, v, rates)
    linear_attention.backward(linear_scan.scan, dout, None, q, k, v, rates)


@pytest.mark.parametrize("length", [128, 200])
def test_operations_are_those_that_torch_counts(length):
    work = AttentionShape(seq_length=length, batch=2, num_heads=4, kv_heads=4, head_dim=16)
    assert counted(lambda: chunked_outside_of_its_operator(work)) == flops("chunked", work)
    assert counted(linear.steps_of(work)["naive"]) == flops("naive", work)


def test_chunked_is_linear_and_the_others_are_quadratic():
    for length in lengths_between(1024, 16384)[:-1]:
        growth = {
            name: flops(name, sized(2 * length)) / flops(name, sized(length)) for name in LABELS
        }
        assert growth["chunked"] == 2
        assert growth["naive"] == pytest.approx(4, rel=0.01)
        assert growth["softmax"] == pytest.approx(4, rel=0.01)


def test_naive_goes_as_far_as_its_scores_fit():
    assert lengths_between(256, 1024) == lengths_between(256, 2047) == [256, 512, 1024]
    assert [length for length in lengths_between(256, 16384) if fits(sized(length))][-1] == 4096
    assert not fits(sized(8192))


def report(times):
    return {
        "rows": [
            {
                "name": name,
                "length": length,
                "median": seconds,
                "tokens_per_second": length / seconds,
            }
            for name, rows in times.items()
            for length, seconds in rows.items()
        ]
    }


def test_the_report_says_what_the_times_say():
    figures = report(
        {
            "chunked": {256: 1.0, 512: 2.0, 1024: 4.0},
            "naive": {256: 2.0, 512: 8.0},
            "softmax": {256: 0.5, 512: 2.0, 1024: 8.0},
        }
    )
    assert [exponent(figures, name) for name in LABELS] == [1, 2, 2]
    assert (overtakes(figures, "naive"), overtakes(figures, "softmax")) == (256, 1024)
    text = markdown(figures)
    assert "| 512 | 256 | 64 | 256 | 1.00 |" in text
    assert "| 1,024 | 256 |  | 128 | 2.00 |" in text
    assert "softmax: time grows as length^2.00" in text
    assert "chunked is faster from 1,024 tokens on than softmax" in text
    slow = report({"chunked": {256: 2.0}, "naive": {256: 3.0}, "softmax": {256: 1.0}})
    assert overtakes(slow, "softmax") is None
    assert exponent(slow, "chunked") is None
    assert "nowhere faster than softmax" in markdown(slow)


def test_the_command_writes_figures_and_a_picture(tmp_path, capsys):
    plot, threads = tmp_path / "new" / "plot.png", torch.get_num_threads()
    shape = [
        "--num-heads",
        "2",
        "--head-dim",
        "8",
        "--min-length",
        "32",
        "--max-length",
        "70",
        "--repeats",
        "2",
    ]
    assert (
        main([*shape, "--max-seconds", "0.01", "--results", str(tmp_path), "--picture", str(plot)])
        == 0
    )
    assert torch.get_num_threads() == threads
    (path,) = tmp_path.glob("linear-*-cores.jsonl")
    result = read_records(path)
    assert [(row["length"], row["name"]) for row in result["rows"]] == [
        (length, name) for length in (32, 64) for name in LABELS
    ]
    for measured_row in result["rows"]:
        assert measured_row["min"] <= measured_row["median"] <= measured_row["max"]
        assert measured_row["rounds"] >= 2  # and more where the machine is quick
        assert measured_row["tokens_per_second"] == pytest.approx(
            measured_row["length"] / measured_row["median"]
        )
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert markdown(result) in capsys.readouterr().out


def test_something_else_is_not_timed_and_bad_input_is_one_line(monkeypatch, tmp_path, capsys):
    ours = linear.linear_attention
    monkeypatch.setattr(
        linear, "linear_attention", lambda *args, **more: [2 * ours(*args, **more)[0]]
    )
    assert (
        main(
            [
                "--min-length",
                "64",
                "--max-length",
                "64",
                "--repeats",
                "1",
                "--results",
                str(tmp_path),
            ]
        )
        == 1
    )
    assert main(["--min-length", "512", "--max-length", "256"]) == 1
    wrong, longest = capsys.readouterr().err.splitlines()
    assert "chunked does not compute the same as the naive form" in wrong
    assert longest == (
        "error: --max-length is 256, but --min-length is 512; give a longer --max-length"
    )
    assert [*tmp_path.iterdir()] == []

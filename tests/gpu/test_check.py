"""Checks of GPUs, on a CPU: results are written as steps end.

A step that is wrong, hangs or is missing is told. Rates are measured too.
"""

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch

import tests.gpu.__main__ as gpu_check
from bench.shapes import MaskedShape
from parallel.context import make_plan
from parallel.context.traffic import sizes
from runtime import machine
from tests import steps
from tests.gpu import emulate, rates
from tests.runtime.test_signals import runs
from tests.starts import wait_until
from tools.common import ceilings
from tools.common.report import read_records
from train.callbacks.progress import machine_line, progress_line
from train.objectives.language import NextToken

METHODS = ("ring", "striped", "zigzag", "allgather")
WORK = MaskedShape(seq_length=64, num_heads=4, kv_heads=2, head_dim=16)
without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tells what happens without a GPU"
)


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(ceilings.MATMUL_SIZES, "cpu", (64,))


@without_gpu
def test_without_a_gpu_one_line_and_nothing_written(tmp_path, capsys):
    assert gpu_check.main(["--output", str(tmp_path / "new")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "needs a CUDA GPU" in printed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_every_step_runs_on_a_cpu_and_is_written_as_it_ends(tmp_path, capsys):
    assert gpu_check.main(["--device", "cpu", "--output", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    ends = {line.split(":")[0]: line.partition(": ")[2] for line in lines if line.endswith(" s)")}
    assert list(ends) == list(gpu_check.STEPS)
    elsewhere = {name for name, ending in ends.items() if not ending.startswith("right")}
    # Tests that are all skipped without a GPU, and apex, which is not here.
    assert elsewhere == {"triton", "resume", "optimizer"}
    (path,) = tmp_path.iterdir()
    step_results = read_records(path)["steps"]
    assert step_results["ranks"]["passed"] > 16
    assert step_results["environment"]["ceilings"]["matmul_tflops"]["float32"] > 0
    assert step_results["training"]["256 tokens"]["tokens_per_second"] > 0


def test_a_step_that_dies_hangs_or_is_wrong_leaves_the_others_results(
    tmp_path, monkeypatch, capsys
):
    outcomes = iter(("dies", "hangs", {"wrong": ["1", "2", "3", "4"]}, {"worst": 0.5}))

    def ended(command, limit):
        what = next(outcomes)
        if what == "hangs":
            raise subprocess.TimeoutExpired(command, 1)
        if isinstance(what, dict):
            Path(command[-1]).write_text(json.dumps(what))
        return -6, "a traceback\nCUDA error: an illegal access\n"

    monkeypatch.setattr(steps, "ended", ended)
    names = ["environment", "backends", "ranks", "attention"]
    assert gpu_check.main(["--device", "cpu", "--output", str(tmp_path), "--steps", *names]) == 1
    printed = capsys.readouterr()
    for words in (
        "environment: failed: CUDA error: an illegal access (",
        "backends: failed: it took longer than 50 s (",
        "ranks: WRONG: 1; 2; 3; and 1 more (",
        "attention: right, worst 0.5 (",
    ):
        assert words in printed.out
    assert "not as it must be: environment, backends, ranks; " in printed.err
    assert list(read_records(next(tmp_path.iterdir()))["steps"]) == names


def test_what_a_step_lacks_is_named_and_what_it_started_ends_with_it(tmp_path):
    def needs_more(device, folder):
        raise ModuleNotFoundError("No module named 'megatron'", name="megatron")

    steps.in_process(steps.Step(needs_more, 1), "cpu", tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text()) == {
        "not_run": "megatron is not installed"
    }
    with pytest.raises(subprocess.TimeoutExpired):
        steps.ended(["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; wait"], 0.3)
    wait_until(lambda: not runs(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize(("last", "wrong"), [(3.5, 0), (4.5, 1), (math.nan, 1), (123456.0, 1)])
def test_a_loss_that_does_not_fall_is_wrong(last, wrong, monkeypatch, tmp_path):
    record = {"iteration": 1, "grad_norm": 1.0, "learning_rate": 1e-3, "iteration_time_ms": 9.0}
    record |= {"tokens_per_second": 9e4, "tflops_per_gpu": 1.0, "mfu": 0.5, "memory_gb": 2.0}
    lines = [
        progress_line(NextToken, [record | {"lm_loss": loss}], 9, 1.0)
        for loss in (*9 * (4.0,), last)
    ]
    monkeypatch.setattr(
        gpu_check, "_run", lambda *_: "\n".join([*lines, machine_line([record], "process")])
    )
    assert len(gpu_check.training("cpu", tmp_path)["wrong"]) == wrong


def test_all_steps_end_within_8_minutes_and_outcomes_are_counted(tmp_path):
    assert sum(step.limit for step in gpu_check.STEPS.values()) <= 480
    cases = (
        "<testcase classname='a' name='good'/><testcase classname='a' "
        "name='bad'><failure/></testcase>"
    )
    (tmp_path / "report.xml").write_text(
        f"<r>{cases}<testcase classname='a' name='away'><skipped/></testcase></r>"
    )
    assert steps.count(tmp_path / "report.xml") == {"passed": 1, "skipped": 1, "wrong": ["a::bad"]}
    missed = {"name": "a", "bound": ">= 1", "ratio": 0.5, "met": False}
    assert (
        steps.verdict({"targets": [missed, missed | {"met": True}]})
        == "right; a >= 1: 0.500, MISSED"
    )


def test_kernels_and_simulated_steps_are_measured():
    result = rates.measure("cpu", WORK, (32, 64), METHODS, 4, 2)
    assert result["skipped"] == {}
    measured = [(row["kernel"], row["seq_length"]) for row in result["kernels"]]
    assert measured == [("sdpa", 32), ("aten", 32), ("sdpa", 64), ("aten", 64)]
    for row in result["kernels"]:
        pairs = row["seq_length"] * (row["seq_length"] + 1) / 2
        assert row["forward_tflops"] == pytest.approx(
            4 * pairs * 4 * 16 / row["forward_seconds"] / 1e12
        )
        assert row["backward_tflops"] == pytest.approx(
            10 * pairs * 4 * 16 / row["backward_seconds"] / 1e12
        )
    rank_figures = result["ranks_of"]
    assert set(rank_figures) == set(METHODS)
    assert rank_figures["ring"]["limit"] == pytest.approx(
        (256 * 257 / 2 / 4) / (64 * 65 / 2 + 3 * 64 * 64)
    )
    assert all(
        row["tflops"] * row["slowest_seconds"] > 0 and row["limit"] <= 1
        for row in rank_figures.values()
    )
    assert all(
        word in rates.told(result) for word in ("aten at 64: ", "zigzag, slowest of 4 ranks: ")
    )
    json.dumps(result)


def test_rounds_with_the_same_tiles_are_timed_once_and_every_step_computes(monkeypatch):
    plan, timed = make_plan("zigzag", seq_len=64, size=4), []

    def time_steps(step, device, repeats):
        step()
        timed.append(step)
        return [1.0]

    monkeypatch.setattr(emulate, "time_steps", time_steps)
    shape_sizes = sizes(plan.geometry, 1, 4, 2, 16, 4)
    seconds = emulate.emulate(plan, shape_sizes, "cpu", torch.float32, 1)
    assert len(timed) == 2 * 3, (
        "own block, an earlier one's and a later one's, forward and backward"
    )
    assert seconds.tolist() == [8.0] * 4  # four rounds, forward and backward


@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_what_is_refused_or_wrong_is_listed_and_has_no_figure(monkeypatch, wrong):
    monkeypatch.setitem(rates.BACKENDS, "cpu", ("aten", "flash_attn_3"))
    monkeypatch.setattr(
        rates, "block_forward", lambda q, *rest: (torch.full_like(q, wrong), q.sum(-1))
    )
    result = rates.measure("cpu", WORK, (32,), ("zigzag",), 2, 1)
    assert [row["kernel"] for row in result["kernels"]] == ["sdpa"]
    assert "differs from scaled_dot_product_attention" in result["skipped"]["aten at 32"]
    assert "needs a cuda device" in result["skipped"]["flash_attn_3 at 32"]
    assert "skipped: flash_attn_3 at 32: UserError" in rates.told(result)


def test_figures_are_held_against_what_is_wanted():
    work = MaskedShape(seq_length=64, num_heads=2, kv_heads=2, head_dim=16)
    figures = rates.measure("cpu", work, (32,), METHODS, 4, 1)
    seconds = {"cudnn": 1.0, "aten": 1.5, "triton": 2.0}
    figures["kernels"] = [
        {"kernel": name, "seq_length": 8192, "forward_seconds": each, "backward_seconds": each}
        for name, each in seconds.items()
    ]
    figures["masked"] = {"off_the_diagonal": 1.1, "packed": 0.9}
    figures["ranks_of"] = {"zigzag": {"of_share": 0.98}}
    by_name = {row["name"]: (row["ratio"], row["met"]) for row in rates.targets(figures, "cudnn")}
    label = "over the best of the others, 8192 tokens, forward"
    assert by_name[f"cudnn {label}"] == (1.0, True)
    assert by_name[f"triton {label} + backward"] == (0.5, False)
    assert by_name["a CAUSAL tile off the diagonal over one on it"] == (1.1, False)
    assert by_name["packed documents over the dense rate"] == (0.9, True)
    assert by_name["zigzag ranks over their share of one GPU's attention"] == (0.98, True)
    assert [row["met"] for row in rates.targets(figures, "cudnn")].count(False) == 3
    figures["kernels"] = figures["kernels"][2:]  # all others are wrong, which the step is to say
    assert not any("best of" in row["name"] for row in rates.targets(figures, "cudnn"))


def test_steps_are_timed_after_warming_up():
    calls = []
    assert len(machine.time_steps(lambda: calls.append(1), "cpu", repeats=3, warm_up=2)) == 3
    assert len(calls) == 5


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it"
)
def test_a_small_measurement_on_the_gpu():
    work = MaskedShape(seq_length=256, num_heads=4, kv_heads=2, head_dim=64, dtype="bfloat16")
    result = rates.measure("cuda", work, (256,), METHODS, 4, 2)
    assert [row["kernel"] for row in result["kernels"]][:2] == ["sdpa", "aten"]
    assert set(result["ranks_of"]) == set(METHODS)
    assert result["machine"]["cuda"] == torch.version.cuda

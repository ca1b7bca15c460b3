"""What needs a GPU, through the same code on the CPU: kernels, simulated steps, ceilings, and the report's plumbing."""

import json
from pathlib import Path

import pytest
import torch

from bench import ceilings, gpu, gpu_check
from bench.workload import Workload
from testing import machine
from testing.records import read_records
from tests.starts import PATIENCE

METHODS = ("ring", "striped", "zigzag", "allgather")
WORK = Workload(seq_length=64, num_heads=4, kv_heads=2, head_dim=16)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(ceilings.MATMUL_SIZES, "cpu", (64,))


def test_kernels_and_simulated_steps_are_measured() -> None:
    result = gpu.measure("cpu", WORK, (32, 64), METHODS, 4, 2)
    assert result["skipped"] == {}
    assert [(row["kernel"], row["seq_length"]) for row in result["kernels"]] == [
        ("sdpa", 32),
        ("aten", 32),
        ("sdpa", 64),
        ("aten", 64),
    ]
    for row in result["kernels"]:
        pairs = row["seq_length"] * (row["seq_length"] + 1) / 2
        assert row["forward_tflops"] == pytest.approx(4 * pairs * 4 * 16 / row["forward_seconds"] / 1e12)
        assert row["backward_tflops"] == pytest.approx(10 * pairs * 4 * 16 / row["backward_seconds"] / 1e12)
    assert set(result["simulated"]) == set(METHODS)
    for step in result["simulated"].values():
        assert step["slowest_seconds"] == max(step["seconds_by_rank"])
        assert sum(step["pairs_by_rank"]) == 256 * 257 / 2
    ratio = result["simulated_ratios"]["ring/zigzag"]
    assert ratio["limit"] == pytest.approx((64 * 65 / 2 + 3 * 64 * 64) / (256 * 257 / 2 / 4))
    simulated = result["simulated"]
    assert ratio["ratio"] == simulated["ring"]["slowest_seconds"] / simulated["zigzag"]["slowest_seconds"]
    text = gpu.table(result)
    assert all(word in text for word in ("aten", "ring/striped", "zigzag/share"))
    json.dumps(result)


@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_what_is_refused_or_wrong_is_listed_and_has_no_figure(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    monkeypatch.setitem(gpu.BACKENDS, "cpu", ("aten", "flash_attn"))
    monkeypatch.setattr(gpu, "block_forward", lambda q, *rest: (torch.full_like(q, wrong), q.sum(-1)))
    result = gpu.measure("cpu", WORK, (32,), ("zigzag",), 2, 1)
    assert [row["kernel"] for row in result["kernels"]] == ["sdpa"]
    assert "differs from scaled_dot_product_attention" in result["skipped"]["aten at 32"]
    assert "needs a cuda device" in result["skipped"]["flash_attn at 32"]
    assert "skipped: flash_attn at 32: UserError" in gpu.table(result)


@without_gpu
def test_without_a_gpu_one_line_and_nothing_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--output", str(tmp_path / "new")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "needs a CUDA GPU" in printed.err
    assert list(tmp_path.iterdir()) == []


def test_the_result_is_named_by_the_device(tmp_path: Path) -> None:
    measured = gpu.measure("cpu", WORK, (32,), (), 2, 1)
    measured["machine"]["device"] = "NVIDIA H100 80GB HBM3"
    tests = {"passed": 3, "failed": 0, "skipped": 0, "failures": [], "seconds": 1.0}
    path = gpu_check.write_result(tmp_path / "results", tests, measured)
    assert path.name == "nvidia-h100-80gb-hbm3.jsonl"
    assert list(path.parent.iterdir()) == [path]
    written = read_records(path)
    assert written["tests"] == tests
    assert {"device", "date", "python", "torch"} <= set(written["machine"])
    assert written["ceilings"]["copy_gb_per_s"] > 0
    assert written["ceilings"]["matmul_tflops"]["float32"] > 0


def test_pytest_is_run_and_its_outcome_counted(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(
        "import pytest\n"
        "@pytest.mark.gpu\ndef test_good(): pass\n"
        "@pytest.mark.gpu\ndef test_bad(): assert False\n"
        "@pytest.mark.gpu\ndef test_not_here(): pytest.skip('why')\n"
        "def test_unmarked(): assert False\n"
    )
    found = gpu_check.run_tests("gpu and not slow", int(PATIENCE), (str(tmp_path), "-p", "no:cacheprovider"))
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["failures"][0].endswith("test_bad")


def test_ceilings_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ceilings.json"
    threads = torch.get_num_threads()
    try:
        assert ceilings.main(["--threads", "1", "--json", str(path)]) == 0
    finally:
        torch.set_num_threads(threads)
    found = read_records(path)["ceilings"]
    assert set(found["matmul_tflops"]) == {"bfloat16", "float32"}
    assert found["threads"] == 1
    assert f"{found['copy_gb_per_s']:.1f} GB/s" in capsys.readouterr().out


def test_steps_are_timed_after_warming_up() -> None:
    calls: list[int] = []
    taken = machine.time_steps(lambda: calls.append(1), "cpu", repeats=3, warm_up=2)
    assert len(taken) == 3
    assert len(calls) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it")
def test_a_small_measurement_on_the_gpu() -> None:
    work = Workload(seq_length=256, num_heads=4, kv_heads=2, head_dim=64, dtype="bfloat16")
    result = gpu.measure("cuda", work, (256,), METHODS, 4, 2)
    assert [row["kernel"] for row in result["kernels"]][:2] == ["sdpa", "aten"]
    assert set(result["simulated"]) == set(METHODS)
    assert result["machine"]["cuda"] == torch.version.cuda

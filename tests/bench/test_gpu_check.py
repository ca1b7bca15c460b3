"""What needs a GPU, through the same code on the CPU: kernels, simulated steps, ceilings, and the report's plumbing."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import ceilings, gpu, gpu_check, gpu_steps
from bench.workload import Workload
from parallel.context import METHODS as METHODS_OF_PLANS
from runtime import machine
from runtime.copies import kept
from runtime.errors import UserError
from testing import threads
from tests.runtime.test_signals import runs
from tests.starts import wait_until
from tools.report import read_records
from train.objectives.language import NextToken
from train.watching.progress import machine_line, progress_line

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


@pytest.mark.slow
def test_every_step_runs_on_a_cpu_and_is_written_as_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu", "--output", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    ends = {line.split(":")[0]: line.partition(": ")[2] for line in lines if line.endswith(" s)")}
    assert list(ends) == list(gpu_steps.STEPS)
    elsewhere = {name for name, said in ends.items() if not said.startswith("right")}
    assert elsewhere == {"waits", "triton", "resume"}  # whose tests are all skipped without a GPU
    (path,) = tmp_path.iterdir()
    steps = read_records(path)["steps"]
    assert steps["ranks"]["cases"] == 4 * len(METHODS_OF_PLANS)
    assert steps["environment"]["ceilings"]["matmul_tflops"]["float32"] > 0
    assert steps["training"]["256 tokens"]["tokens_per_second"] > 0


def test_a_step_that_dies_hangs_or_is_wrong_leaves_the_others_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = iter(("dies", "hangs", {"wrong": ["a tile"]}, {"worst": 0.5}))

    def ended(command: list[str], limit: float) -> tuple[int, str]:
        what = next(said)
        if what == "hangs":
            raise subprocess.TimeoutExpired(command, 1)
        if isinstance(what, dict):
            Path(command[-1]).write_text(json.dumps(what))
        return -6, "a traceback\nCUDA error: an illegal access\n"

    monkeypatch.setattr(gpu_check, "ended", ended)
    steps = ["environment", "backends", "ranks", "attention"]
    assert gpu_check.main(["--device", "cpu", "--output", str(tmp_path), "--steps", *steps]) == 1
    printed = capsys.readouterr()
    for words in (
        "environment: failed: CUDA error: an illegal access (",
        "backends: failed: it took longer than 50 s (",
        "ranks: WRONG: a tile (",
        "attention: right, worst 0.5 (",
    ):
        assert words in printed.out
    assert "not as it must be: environment, backends, ranks; " in printed.err
    assert list(read_records(next(tmp_path.iterdir()))["steps"]) == steps


def test_what_a_step_needs_and_is_not_here_is_named(tmp_path: Path) -> None:
    def needs_more(device: str, folder: Path) -> dict[str, Any]:
        raise ModuleNotFoundError("No module named 'megatron'", name="megatron")

    gpu_check.in_process(gpu_steps.Step(needs_more, 1), "cpu", tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text()) == {"not_run": "megatron is not installed"}


def test_what_a_step_started_ends_with_it(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        gpu_check.ended(["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; wait"], 0.3)
    wait_until(lambda: not runs(int((tmp_path / "pid").read_text())))


def test_backends_that_are_wrong_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert gpu_steps.backends("cpu", tmp_path)["wrong"] == []
    plain = gpu_steps.block_forward
    monkeypatch.setattr(gpu_steps, "block_forward", lambda q, k, *rest: plain(q, k.flip(1), *rest))
    assert gpu_steps.backends("cpu", tmp_path)["wrong"][0].startswith("aten, width 16, 50 tokens, full: ")


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access"), "wrong"),
        (Exception("out of resource: shared memory"), "wrong"),
        (UserError("attention_backend is flash_attn, which is not installed"), "refused"),
        (torch.OutOfMemoryError("CUDA out of memory"), "refused"),
    ],
)
def test_what_cannot_run_here_is_told_from_what_fails(
    error: Exception, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(gpu_steps, "block_forward", fails)
    found = gpu_steps.backends("cpu", tmp_path)
    assert found["cases"] == 0
    assert [name for name in ("wrong", "refused") if found[name]] == [place]
    assert len(found[place]) == 2
    lost = "the device is lost since aten, width 16, 50 tokens, full; not run after it: 1 case"
    assert (found["wrong"][:1] == [lost]) == isinstance(error, torch.AcceleratorError)


@pytest.mark.parametrize("fatal", [False, True])
def test_ranks_and_waits_go_on_after_a_case_that_raises(
    fatal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unless it takes the device away, which a wait for it shows, whatever the error's type is."""

    def fails(*_: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access")

    def wait() -> None:
        if fatal:
            fails()

    plain = threads.attend
    monkeypatch.setattr(threads, "attend", lambda plan, x: fails() if plan.size == 8 else plain(plan, x))
    found = gpu_steps.ranks("cpu", tmp_path)
    assert len(found["wrong"]) == found["cases"] == 2 * len(METHODS_OF_PLANS)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(gpu, "layers_and_methods", lambda *_: {"a": fails, "b": fails, "c": lambda: None})
    found = gpu_steps.waits("cuda", tmp_path)
    said = "the device is lost since a; not run after it: 2 cases"
    faults = [f"{case}: RuntimeError: Triton Error [CUDA]: an illegal memory access" for case in "ab"]
    assert found["wrong"] == ([said, faults[0]] if fatal else faults)
    assert found["cases"] == (0 if fatal else 1)
    assert gpu_check.verdict({"wrong": ["1", "2", "3", "4"]}) == "WRONG: 1; 2; 3; and 1 more"


def test_every_layer_and_method_whose_waits_are_sought_runs() -> None:
    steps = gpu.layers_and_methods("cpu", gpu_steps.DOCUMENTS["cpu"])
    assert len(steps) == 5 + 2 * len(METHODS_OF_PLANS)
    for step in steps.values():
        step()


def test_waits_are_sought_where_documents_are_new(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step that was warmed copies no indices, in which a wait would be."""
    mode = ["default"]

    @kept(4)
    def copied(device: torch.device) -> None:
        if mode[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.append)
    monkeypatch.setattr(gpu, "layers_and_methods", lambda *_: {"ring": lambda: copied(torch.device("cpu"))})
    assert gpu_steps.waits("cuda", tmp_path)["wrong"] == ["ring: RuntimeError: called a synchronizing CUDA operation"]


def test_figures_are_held_against_what_is_wanted() -> None:
    work = Workload(seq_length=64, num_heads=2, kv_heads=2, head_dim=16)
    found = gpu.measure("cpu", work, (32,), METHODS, 4, 1)
    seconds = {"cudnn": 1.0, "aten": 1.5, "triton": 2.0}
    found["kernels"] = [
        {"kernel": name, "seq_length": 8192, "forward_seconds": each, "backward_seconds": each}
        for name, each in seconds.items()
    ]
    found["masked"] = {"off_the_diagonal": 1.1, "packed": 0.9}
    found["simulated_ratios"] = {"zigzag/share": {"ratio": 1.02}}
    wanted = {one["name"]: (one["ratio"], one["met"]) for one in gpu.targets(found, "cudnn")}
    label = "over the best of torch's and flash-attn's, 8192 tokens, forward"
    assert wanted[f"cudnn {label}"] == (1.0, True)
    assert wanted[f"triton {label} + backward"] == (0.5, False)
    assert wanted["a CAUSAL tile off the diagonal over one on it"] == (1.1, False)
    assert wanted["packed documents over the dense rate"] == (0.9, True)
    assert wanted["zigzag ranks over their share of one GPU's attention"] == (pytest.approx(0.98, abs=0.01), True)
    said = gpu_check.verdict({"targets": gpu.targets(found, "cudnn")})
    assert said.count("MISSED") == 3
    found["kernels"] = found["kernels"][2:]  # all others are wrong, which the step is to say
    assert not any("best of" in one["name"] for one in gpu.targets(found, "cudnn"))


@pytest.mark.parametrize(("last", "wrong"), [(3.5, 0), (4.5, 1), (math.nan, 1), (123456.0, 1)])
def test_a_loss_that_does_not_fall_is_wrong(
    last: float, wrong: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = {"iteration": 1, "grad_norm": 1.0, "learning_rate": 1e-3, "iteration_time_ms": 9.0}
    record |= {"tokens_per_second": 9e4, "tflops_per_gpu": 1.0, "mfu": 0.5, "memory_gb": 2.0}
    lines = [progress_line(NextToken, [record | {"lm_loss": one}], 9, 1.0) for one in (*9 * (4.0,), last)]
    monkeypatch.setattr(gpu_steps, "_run", lambda *_: "\n".join([*lines, machine_line([record], "process")]))
    assert len(gpu_steps.training("cpu", tmp_path)["wrong"]) == wrong


def test_all_steps_end_within_8_minutes() -> None:
    assert sum(step.limit for step in gpu_steps.STEPS.values()) <= 480


def test_junit_is_counted(tmp_path: Path) -> None:
    cases = "<testcase classname='a' name='good'/><testcase classname='a' name='bad'><failure/></testcase>"
    (tmp_path / "report.xml").write_text(f"<r>{cases}<testcase classname='a' name='away'><skipped/></testcase></r>")
    assert gpu_steps.count(tmp_path / "report.xml") == {"passed": 1, "skipped": 1, "wrong": ["a::bad"]}


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

"""Rates of a GPU, by the same code on the CPU: kernels, ranks' computing, ceilings."""

import json

import pytest
import torch

from bench.shapes import AttentionShape
from runtime import machine
from tests.gpu import rates
from tools.common import ceilings

METHODS = ("ring", "striped", "zigzag", "allgather")
WORK = AttentionShape(seq_length=64, num_heads=4, kv_heads=2, head_dim=16)


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(ceilings.MATMUL_SIZES, "cpu", (64,))


def test_kernels_and_simulated_steps_are_measured():
    result = rates.measure("cpu", WORK, (32, 64), METHODS, 4, 2)
    assert result["skipped"] == {}
    measured = [(row["kernel"], row["seq_length"]) for row in result["kernels"]]
    assert measured == [("sdpa", 32), ("aten", 32), ("sdpa", 64), ("aten", 64)]
    for row in result["kernels"]:
        pairs = row["seq_length"] * (row["seq_length"] + 1) / 2
        assert row["forward_tflops"] == pytest.approx(4 * pairs * 4 * 16 / row["forward_seconds"] / 1e12)
        assert row["backward_tflops"] == pytest.approx(10 * pairs * 4 * 16 / row["backward_seconds"] / 1e12)
    found = result["ranks_of"]
    assert set(found) == set(METHODS)
    assert found["ring"]["limit"] == pytest.approx((256 * 257 / 2 / 4) / (64 * 65 / 2 + 3 * 64 * 64))
    for row in found.values():
        assert row["tflops"] * row["slowest_seconds"] > 0
        assert row["limit"] <= 1
    text = rates.table(result)
    assert all(word in text for word in ("aten", "zigzag", "of its share"))
    json.dumps(result)


@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_what_is_refused_or_wrong_is_listed_and_has_no_figure(monkeypatch, wrong):
    monkeypatch.setitem(rates.BACKENDS, "cpu", ("aten", "flash_attn_3"))
    monkeypatch.setattr(rates, "block_forward", lambda q, *rest: (torch.full_like(q, wrong), q.sum(-1)))
    result = rates.measure("cpu", WORK, (32,), ("zigzag",), 2, 1)
    assert [row["kernel"] for row in result["kernels"]] == ["sdpa"]
    assert "differs from scaled_dot_product_attention" in result["skipped"]["aten at 32"]
    assert "needs a cuda device" in result["skipped"]["flash_attn_3 at 32"]
    assert "skipped: flash_attn_3 at 32: UserError" in rates.table(result)


def test_figures_are_held_against_what_is_wanted():
    work = AttentionShape(seq_length=64, num_heads=2, kv_heads=2, head_dim=16)
    found = rates.measure("cpu", work, (32,), METHODS, 4, 1)
    seconds = {"cudnn": 1.0, "aten": 1.5, "triton": 2.0}
    found["kernels"] = [
        {"kernel": name, "seq_length": 8192, "forward_seconds": each, "backward_seconds": each}
        for name, each in seconds.items()
    ]
    found["masked"] = {"off_the_diagonal": 1.1, "packed": 0.9}
    found["ranks_of"] = {"zigzag": {"of_share": 0.98}}
    wanted = {one["name"]: (one["ratio"], one["met"]) for one in rates.targets(found, "cudnn")}
    label = "over the best of the others, 8192 tokens, forward"
    assert wanted[f"cudnn {label}"] == (1.0, True)
    assert wanted[f"triton {label} + backward"] == (0.5, False)
    assert wanted["a CAUSAL tile off the diagonal over one on it"] == (1.1, False)
    assert wanted["packed documents over the dense rate"] == (0.9, True)
    assert wanted["zigzag ranks over their share of one GPU's attention"] == (0.98, True)
    assert [one["met"] for one in rates.targets(found, "cudnn")].count(False) == 3
    found["kernels"] = found["kernels"][2:]  # all others are wrong, which the step is to say
    assert not any("best of" in one["name"] for one in rates.targets(found, "cudnn"))


def test_steps_are_timed_after_warming_up():
    calls = []
    taken = machine.time_steps(lambda: calls.append(1), "cpu", repeats=3, warm_up=2)
    assert len(taken) == 3
    assert len(calls) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it")
def test_a_small_measurement_on_the_gpu():
    work = AttentionShape(seq_length=256, num_heads=4, kv_heads=2, head_dim=64, dtype="bfloat16")
    result = rates.measure("cuda", work, (256,), METHODS, 4, 2)
    assert [row["kernel"] for row in result["kernels"]][:2] == ["sdpa", "aten"]
    assert set(result["ranks_of"]) == set(METHODS)
    assert result["machine"]["cuda"] == torch.version.cuda

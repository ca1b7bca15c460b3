"""The account of memory is right to the byte.

Policies come out in their order, and cases are configurations.
"""

import pytest
import torch

from bench import memory
from bench.memory import CASES, OFFLOAD, POLICIES, command, compare, configured, lines_of, main

SMALL = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 256 --vocab-size 1024 "
    "--num-layers 3 "
    "--device cpu"
)
without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tells what happens without a GPU"
)


def test_allocations_are_counted_to_the_byte():
    tensors = []

    def step():
        tensors.append(torch.empty(1 << 20))
        torch.empty(1 << 19).sum().item()
        with torch.profiler.record_function(memory.FORWARD_END):
            pass
        tensors.clear()

    watched = memory.watch_cpu(step, [])
    assert watched["kept"] == 4 << 20
    assert 6 << 20 <= watched["peak"] < (6 << 20) + 256  # the sum's result too


@pytest.mark.slow
def test_policies_keep_and_need_less_and_less():
    """And what is predicted is what a process takes."""
    rows = {}
    for line in lines_of(POLICIES.replace("1024", "32")):
        rows[line.removeprefix("long").strip()] = compare(1, f"{command(line)[1]} {SMALL}")
    assert all(abs(row["error"]) < 0.05 for row in rows.values())
    chunks = "loss_chunk=32 ffn_chunk=32"
    out_and_lse = 3 * 256 * (64 + 4) * 4  # of three layers of four heads
    kept_bytes = {name: row["kept_bytes"] for name, row in rows.items()}
    apart = kept_bytes["attention_boundary loss_chunk=32"] - kept_bytes["full loss_chunk=32"]
    assert abs(apart - out_and_lse) < 4096
    assert kept_bytes[""] > kept_bytes["loss_chunk=32"] > kept_bytes[f"full {chunks}"]
    peaks = [
        rows[name]["measured_bytes"]
        for name in ("", "loss_chunk=32", "attention_boundary loss_chunk=32")
    ]
    assert peaks == sorted(set(peaks), reverse=True)
    forwards = {name.split(" ")[0]: row["attention_forwards"] for name, row in rows.items()}
    assert forwards == {
        "": 1,
        "loss_chunk=32": 1,
        "selective": 2,
        "attention_boundary": 1,
        "full": 2,
    }


def test_every_case_is_a_configuration():
    for line in lines_of(CASES + POLICIES + OFFLOAD):
        processes, flags = command(line)
        assert processes in (1, 4, 8)
        configured(f"{flags} --device cpu")


@without_gpu
def test_bad_input_is_one_line(capsys):
    assert main(["--device", "cuda"]) == 1
    assert main(["--only", "none of them"]) == 1
    device, only = capsys.readouterr().err.splitlines()
    assert device == (
        "error: --device cuda needs a CUDA GPU, but torch finds none; run this on a "
        "machine with a GPU"
    )
    assert only.startswith(
        "error: --only is 'none of them', but no case has that in its name; the cases are: llama; "
    )

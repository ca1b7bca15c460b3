"""Check a GPU in steps.

Kernels against float64, all ranks of a plan on it, waits, rates, a run of 1B, a profile.

    make gpu-check
    make gpu-check ARGS="--steps environment backends"

One GPU, under 8 minutes. Each step is a process of its own, and its result is on the disk before
the next begins, in bench/results/<device>-check.jsonl; what cannot run here is skipped there, with
the reason. Exit status 1 where something is wrong, or where there is no GPU (then nothing is
written). With --device cpu the same steps are small, to try them. A step returns figures, and under
"wrong" what is not as it must be.
"""

import importlib
import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.attention import DEFAULT_METHODS
from bench.harness import need_cuda, target
from bench.shapes import MaskedShape
from kernels.attention import select_backend
from runtime.errors import UserError
from tests.gpu import layer_rates, rates
from tests.steps import SkippedStep, Step, asked, check, launched, tests
from tools.common.arguments import one_line_errors, parser_for, run_command
from tools.common.ceilings import ceilings
from tools.common.shapes import DTYPES
from train.optimizers.apex import apex_kernel

RUN = {
    "cuda": (
        "--bf16 --num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length "
        "8192 --vocab-size 32000"
    ),
    "cpu": (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 256 "
        "--vocab-size 512 --lr 3e-3"
    ),
}
MFU = {"cuda": {8192: 0.4, 32768: 0.5}, "cpu": {256: 0.0}}
"""Wanted by length, with half of the pairs counted, as a causal mask has it."""
STEPS_OF_RUN = 20
THOUSANDS = {"": 1, "k": 1e3, "M": 1e6}


def environment(device: str, folder: Path) -> dict[str, Any]:
    """Measure copies and matrix products."""
    return {"ceilings": ceilings(device, (_dtype(device),))}


ATTENTION = "tests/gpu/test_attention.py"


def backends(device: str, folder: Path) -> dict[str, Any]:
    """Compare every backend with float64.

    Cases are widths, lengths, grouped heads, slices of longer tensors, and log-sum-exp.
    """
    return tests(device, folder, ATTENTION, "-k", "backend")


def triton(device: str, folder: Path) -> dict[str, Any]:
    """Run the kernels' tests that need a GPU, Triton's against its references among them."""
    return tests("cuda", folder, "tests/kernels")


def ranks(device: str, folder: Path) -> dict[str, Any]:
    """Attend with all ranks of every method as threads, whole and packed.

    They are compared with one attention of the same dtype.
    """
    return tests(device, folder, ATTENTION, "-k", "ranks")


def waits(device: str, folder: Path) -> dict[str, Any]:
    """Let torch raise where a layer makes the host wait for the GPU."""
    return tests(device, folder, ATTENTION, "-k", "wait")


def attention(device: str, folder: Path) -> dict[str, Any]:
    """Measure kernels' rates, and emulated ranks."""
    big = device == "cuda"
    heads, width = (16, 128) if big else (2, 16)
    work = MaskedShape(
        seq_length=8192 if big else 64,
        num_heads=heads,
        kv_heads=heads,
        head_dim=width,
        dtype=_dtype(device),
    )
    lengths = rates.LENGTHS if big else (64,)
    rows = rates.measure(device, work, lengths, DEFAULT_METHODS, 8, 20 if big else 2)
    print(rates.told(rows))
    rows["masked"] = rates.masked(
        device, replace(work, seq_length=32768) if big else work, 20 if big else 2
    )
    print(f"masked: {rows['masked']}")
    rows["targets"] = rates.targets(rows, select_backend("auto", device, DTYPES[work.dtype]).name)
    rows["wrong"] = [
        f"{label}: {reason}" for label, reason in rows["skipped"].items() if not expected(reason)
    ]
    return rows


def expected(reason: str) -> bool:
    """Say that a skipped figure is of a library not here, or does not suit shape or memory."""
    return reason.startswith(("UserError", "OutOfMemoryError")) or "would be padded" in reason


def linear(device: str, folder: Path) -> dict[str, Any]:
    """Measure linear attention by length and the delta rule, forward + backward.

    flash-linear-attention's stand beside them.
    """
    heads, width, lengths = (
        (16, 128, (8192, 32768, 131072)) if device == "cuda" else (2, 16, (128,))
    )
    limits, rows, targets = ceilings(device, (_dtype(device),)), [], []
    delta = layer_rates.delta_rules(
        device,
        MaskedShape(
            seq_length=lengths[0],
            num_heads=heads,
            kv_heads=heads,
            head_dim=width,
            dtype=_dtype(device),
        ),
        20 if device == "cuda" else 2,
    )
    targets += [
        target(f"delta rule over {name}", ratio, 1.0)
        for name, ratio in delta["times_as_fast"].items()
    ]
    print(f"delta rule: {delta}", flush=True)
    for length in lengths:
        work = MaskedShape(
            seq_length=length, num_heads=heads, kv_heads=heads, head_dim=width, dtype=_dtype(device)
        )
        row = layer_rates.linear_beside_the_limit(
            device, work, limits, 20 if device == "cuda" else 2
        )
        rows.append(row)
        print(row, flush=True)
        targets.append(target(f"of the limit, {length} tokens", row["of_the_limit"], 0.6))
        if "times_as_fast" in row:
            targets.append(
                target(f"over flash-linear-attention, {length} tokens", row["times_as_fast"], 1.2)
            )
    wrong = [row["wrong"] for row in (delta, *rows) if row.get("wrong")]
    return {"rows": rows, "delta": delta, "targets": targets, "wrong": wrong}


def optimizer(device: str, folder: Path) -> dict[str, Any]:
    """Step weights of 0.5B parameters by torch's AdamW and by apex's kernel, where that is."""
    try:
        apex_kernel()
    except UserError as error:
        raise SkippedStep(str(error)) from error
    layer = [*[(2048, 2048)] * 4, *[(5504, 2048)] * 3, (2048,), (2048,)]
    return layer_rates.optimizers(device, layer * 10 if device == "cuda" else [(33, 7), (7,)], 20)


def training(device: str, folder: Path) -> dict[str, Any]:
    """Train for some steps on drawn tokens: on a GPU, 1B parameters at 8,192 and 32,768 tokens."""
    return _trained(device)


def compiled(device: str, folder: Path) -> dict[str, Any]:
    """Train as in the step training, with layers that torch.compile fuses."""
    return _trained(device, "--compile")


def _trained(device: str, *more: str) -> dict[str, Any]:
    results: dict[str, Any] = {"wrong": [], "targets": []}
    for length, min_mfu in MFU[device].items():
        output = _run(
            device, "--save", "none", "--log-interval", "1", "--seq-length", str(length), *more
        )
        losses = [float(x) for x in re.findall(r"\| loss (\S+)", output)]  # nan too
        rates = [
            float(x) * THOUSANDS[unit]
            for x, unit in re.findall(r"([\d.]+)([kM]?) tokens/s", output)
        ]
        share, memory = re.findall(r"MFU ([\d.]+)%, ([\d.]+) GB of memory", output)[-1]
        first, last = fmean(losses[:5]), fmean(losses[-5:])
        if not last < first:
            results["wrong"].append(
                f"{length} tokens: the loss goes from {first:.4f} to {last:.4f}, over 5 steps each"
            )
        figures = {"tokens_per_second": median(rates[len(rates) // 2 :]), "mfu": float(share) / 100}
        results[f"{length} tokens"] = figures | {"memory_gb": float(memory)}
        results["targets"].append(target(f"MFU, {length} tokens", figures["mfu"], min_mfu))
    return results


def resume(device: str, folder: Path) -> dict[str, Any]:
    """Run the tests of whole runs on a GPU: a checkpoint and its resume, recomputation, offload."""
    paths = (
        "tests/test_gpu.py",
        "tests/parallel",
        "tests/model",
        "tests/train/optimizers/test_host.py",
    )
    return tests("cuda", folder, *paths)


def profile(device: str, folder: Path) -> dict[str, Any]:
    """Profile steps of two layers of that model; the table says where time and memory go."""
    importlib.import_module("tomli_w")  # a run that is kept writes its configuration
    more = (
        "--num-layers",
        "2",
        "--profile",
        "--profile-step-start",
        "5",
        "--profile-step-end",
        "8",
    )
    _run(device, "--save", str(folder / "run"), *more)
    return {"table": next((folder / "run").rglob("*.md")).read_text().splitlines()}


def _run(device: str, *more: str) -> str:
    """Train on drawn tokens; return what the run says."""
    flags = (
        f"{RUN[device]} --device {device} --train-iters {STEPS_OF_RUN} --micro-batch-size 1 "
        f"--global-batch-size 1"
    )
    flags += " --mock-data --eval-iters 0 --save-interval none"
    status, output = launched(1, "pretrain_gpt.py", *flags.split(), *more)
    if status:
        raise UserError(f"the run ended with status {status}; its lines stand above")
    return output


def _dtype(device: str) -> str:
    return "bfloat16" if device == "cuda" else "float32"


STEPS = {
    "environment": Step(environment, 15),
    "backends": Step(backends, 50),
    "triton": Step(triton, 70),
    "ranks": Step(ranks, 40),
    "waits": Step(waits, 20),
    "attention": Step(attention, 60),
    "linear": Step(linear, 30),
    "optimizer": Step(optimizer, 15),
    "training": Step(training, 90),
    "resume": Step(resume, 60),
    "profile": Step(profile, 30),
}
"""In the order of what only a GPU can show; what comes first needs least. Together 8 minutes."""
MORE = {"compiled": Step(compiled, 240)}
"""Run where they are asked for."""


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = asked(parser_for("python -m tests.gpu", __doc__), STEPS, argv, MORE)
    need_cuda(args.device)
    check("tests.gpu", "gpu-check", args, STEPS | MORE)


if __name__ == "__main__":
    run_command(main)

"""The steps of `make gpu-check`, each in a process of its own. On a CPU they are the same, smaller.

A step returns figures, and under "wrong" what is not as it must be. torch is all that the first ones need.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import ceilings, gpu
from bench import linear as of_linear
from bench.attention import DEFAULT_METHODS
from bench.errors import swept
from bench.rounds import target
from bench.workload import Workload
from kernels.attention import block_backward, block_forward, select_backend
from kernels.blocks import CAUSAL, FULL
from model.attention import sdpa
from parallel.context import METHODS, make_plan
from runtime.copies import FORGET
from runtime.errors import UserError
from testing import threads

ROOT = Path(__file__).resolve().parent.parent
BOUNDS = {"cuda": 2e-2, "cpu": 1e-5}
"""Relative error against float64 in the 2-norm: inputs are bfloat16 on a GPU, float32 on a CPU."""
WIDTHS = {"cuda": (64, 128, 256), "cpu": (16,)}
LENGTHS = {"cuda": (1000, 8192), "cpu": (50,)}
DOCUMENTS = {"cuda": (0, 100, 1500, 1501, 2048), "cpu": (0, 7, 30, 31, 64)}
RUN = {
    "cuda": "--bf16 --num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 8192 --vocab-size 32000",
    "cpu": "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 256 --vocab-size 512 --lr 3e-3",
}
MFU = {"cuda": {8192: 0.4, 32768: 0.5}, "cpu": {256: 0.0}}
"""What is wanted by length, with half of the pairs counted, as a causal mask has it."""
STEPS_OF_RUN = 20
THOUSANDS = {"": 1, "k": 1e3, "M": 1e6}


class SkippedStep(UserError):
    """What a step needs is not here; the message says what."""


def environment(device: str, folder: Path) -> dict[str, Any]:
    """Measure copies and matrix products."""
    return {"ceilings": ceilings.measure(device, (_dtype(device),))}


def backends(device: str, folder: Path) -> dict[str, Any]:
    """Compare every backend with float64: widths, lengths, grouped heads, slices of longer tensors, log-sum-exp."""
    several = product(gpu.BACKENDS[device], WIDTHS[device], LENGTHS[device], (FULL, CAUSAL))
    cases = {
        f"{name}, width {width}, {length} tokens, {kind.lower()}": partial(_error_of, name, device, width, length, kind)
        for name, width, length, kind in several
    }
    return swept(device, cases, BOUNDS[device], (UserError, torch.OutOfMemoryError))  # not installed, or too large


def _error_of(name: str, device: str, width: int, length: int, kind: str) -> float:
    """Return the largest relative error of out, log-sum-exp, dq, dk and dv; 4 query heads share 2 of keys."""
    work = Workload(seq_length=length + 8, num_heads=4, kv_heads=2, head_dim=width, dtype=_dtype(device))
    q, k, v, dout = (x[:, 8:] for x in work.tensors(device))  # a slice: strides of the longer tensor
    backend, scale = select_backend(name, device, q.dtype), width**-0.5
    out, lse = block_forward(q, k, v, kind, scale, backend)
    found = [out, lse, *block_backward(dout, q, k, v, out, lse, kind, scale, backend)]
    truth = _in_float64(q, k, v, dout, kind, scale)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, truth, strict=True))


def _in_float64(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, kind: str, scale: float) -> list[Tensor]:
    """Return out, lse, dq, dk and dv, a head at a time: scores of 8,192 tokens take half a gigabyte."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    group, outs, sums = q.shape[2] // k.shape[2], [], []
    gradients = [torch.zeros_like(x) for x in leaves]
    for head in range(q.shape[2]):
        one, key, value = leaves[0][:, :, head], leaves[1][:, :, head // group], leaves[2][:, :, head // group]
        scores = one @ key.transpose(1, 2) * scale
        if kind == CAUSAL:
            scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf"))
        out = scores.softmax(-1) @ value
        for total, part in zip(gradients, torch.autograd.grad(out, leaves, dout[:, :, head].double()), strict=True):
            total += part
        outs.append(out.detach())
        sums.append(scores.detach().logsumexp(-1))
    return [torch.stack(outs, 2), torch.stack(sums, 2), *gradients]


def triton(device: str, folder: Path) -> dict[str, Any]:
    """Run the kernels' tests that need a GPU, Triton's against its references among them."""
    return _tests(folder, "tests/kernels")


def ranks(device: str, folder: Path) -> dict[str, Any]:
    """Attend with all ranks of every method as threads, whole and packed, against one attention of the same dtype."""
    cases = {
        f"{method} on {size}, {'whole' if documents is None else 'packed'}": partial(
            _error_of_ranks, method, device, size, documents
        )
        for size, documents, method in product((4, 8), (None, DOCUMENTS[device]), METHODS)
    }
    return swept(device, cases, BOUNDS[device])


def _error_of_ranks(method: str, device: str, size: int, documents: tuple[int, ...] | None) -> float:
    """Return the relative error of out, dq, dk and dv of all ranks of a method."""
    length = DOCUMENTS[device][-1]
    work = Workload(seq_length=length, num_heads=8, kv_heads=8, head_dim=64 if device == "cuda" else 16)
    inputs = [x.to(getattr(torch, _dtype(device))) for x in work.tensors(device)]
    plan = make_plan(method, seq_len=length, size=size, documents=documents)
    return gpu._error(threads.attend(plan, inputs), _whole(inputs, documents))


def _whole(inputs: list[Tensor], documents: tuple[int, ...] | None) -> list[Tensor]:
    """Return out, dq, dk and dv of torch's own attention, document by document, in float64."""
    *leaves, dout = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    ranges = pairwise(documents or (0, dout.shape[1]))
    out = torch.cat([sdpa(*(x[:, a:b] for x in leaves)) for a, b in ranges], 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def waits(device: str, folder: Path) -> dict[str, Any]:
    """Let torch raise where a layer makes the host wait for the GPU."""
    if device != "cuda":
        raise SkippedStep("a CPU is never waited for")
    steps = gpu.layers_and_methods(device, DOCUMENTS[device])
    found = swept(device, {name: partial(_unwaited, step) for name, step in steps.items()}, 0)
    return {name: found[name] for name in ("cases", "wrong")}


def _unwaited(step: Callable[[], object]) -> float:
    """Run a step twice, the second time with torch raising where the host waits; return 0."""
    step()  # kernels are chosen and compiled once
    torch.cuda.synchronize()
    for forget in FORGET:  # other documents come with every micro-batch
        forget()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return 0.0


def attention(device: str, folder: Path) -> dict[str, Any]:
    """Measure kernels' rates, and emulated ranks."""
    big = device == "cuda"
    heads, width = (16, 128) if big else (2, 16)
    work = Workload(
        seq_length=8192 if big else 64, num_heads=heads, kv_heads=heads, head_dim=width, dtype=_dtype(device)
    )
    lengths = gpu.LENGTHS if big else (64,)
    found = gpu.measure(device, work, lengths, DEFAULT_METHODS, 8, 20 if big else 2)
    print(gpu.table(found))
    found["masked"] = gpu.masked(device, replace(work, seq_length=32768) if big else work, 20 if big else 2)
    print(f"masked: {found['masked']}")
    found["targets"] = gpu.targets(found, select_backend("auto", device, getattr(torch, work.dtype)).name)
    found["wrong"] = [f"{label}: {reason}" for label, reason in found["skipped"].items() if not expected(reason)]
    return found


def expected(reason: str) -> bool:
    """Whether what was skipped is not here, or does not suit the shape or the memory."""
    return reason.startswith(("UserError", "OutOfMemoryError")) or "would be padded" in reason


def linear(device: str, folder: Path) -> dict[str, Any]:
    """Measure linear attention by length, forward + backward, beside flash-linear-attention's and what limits both."""
    heads, width, lengths = (16, 128, (8192, 32768, 131072)) if device == "cuda" else (2, 16, (128,))
    limits, rows, wanted = ceilings.measure(device, (_dtype(device),)), [], []
    for length in lengths:
        work = Workload(seq_length=length, num_heads=heads, kv_heads=heads, head_dim=width, dtype=_dtype(device))
        row = of_linear.beside_the_limit(device, work, limits, 20 if device == "cuda" else 2)
        rows.append(row)
        print(row, flush=True)
        wanted.append(target(f"of the limit, {length} tokens", row["of_the_limit"], 0.6))
        if "times_as_fast" in row:
            wanted.append(target(f"over flash-linear-attention, {length} tokens", row["times_as_fast"], 1.2))
    return {"rows": rows, "targets": wanted, "wrong": [row["wrong"] for row in rows if row.get("wrong")]}


def training(device: str, folder: Path) -> dict[str, Any]:
    """Train for some steps on drawn tokens: 1B parameters at 8,192 and at 32,768 tokens on a GPU."""
    return _trained(device)


def compiled(device: str, folder: Path) -> dict[str, Any]:
    """Train as in the step training, with layers that torch.compile fuses."""
    return _trained(device, "--compile")


def _trained(device: str, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = {"wrong": [], "targets": []}
    for length, least in MFU[device].items():
        said = _run(device, "--save", "none", "--log-interval", "1", "--seq-length", str(length), *more)
        losses = [float(x) for x in re.findall(r"\| loss (\S+)", said)]  # nan too
        rates = [float(x) * THOUSANDS[unit] for x, unit in re.findall(r"([\d.]+)([kM]?) tokens/s", said)]
        share, memory = re.findall(r"MFU ([\d.]+)%, ([\d.]+) GB of memory", said)[-1]
        first, last = fmean(losses[:5]), fmean(losses[-5:])
        if not last < first:
            found["wrong"].append(f"{length} tokens: the loss goes from {first:.4f} to {last:.4f}, over 5 steps each")
        figures = {"tokens_per_second": median(rates[len(rates) // 2 :]), "mfu": float(share) / 100}
        found[f"{length} tokens"] = figures | {"memory_gb": float(memory)}
        found["targets"].append(target(f"MFU, {length} tokens", figures["mfu"], least))
    return found


def resume(device: str, folder: Path) -> dict[str, Any]:
    """Run the tests of whole runs on a GPU: a checkpoint and its resume, recomputation, offload."""
    return _tests(folder, "tests/test_gpu.py", "tests/parallel", "tests/model", "tests/train/test_host_moments.py")


def profile(device: str, folder: Path) -> dict[str, Any]:
    """Profile steps of two layers of that model; the table says where time and memory go."""
    importlib.import_module("tomli_w")  # a run that is kept writes its configuration
    more = ("--num-layers", "2", "--profile", "--profile-step-start", "5", "--profile-step-end", "8")
    _run(device, "--save", str(folder / "run"), *more)
    return {"table": next((folder / "run").rglob("*.md")).read_text().splitlines()}


def _run(device: str, *more: str) -> str:
    """Train on drawn tokens; return what the run says."""
    flags = f"{RUN[device]} --device {device} --train-iters {STEPS_OF_RUN} --micro-batch-size 1 --global-batch-size 1"
    flags += " --mock-data --eval-iters 0 --save-interval none"
    status, said = launched(1, "pretrain_gpt.py", *flags.split(), *more)
    if status:
        raise UserError(f"the run ended with status {status}; its lines stand above")
    return said


def launched(processes: int, *command: str) -> tuple[int, str]:
    """Run a program under torchrun and print its lines as they come; return its status and the lines.

    That is when all are gone that may print.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with subprocess.Popen(
        [*torchrun, *command], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        lines = []
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def _tests(folder: Path, *paths: str) -> dict[str, Any]:
    """Run tests marked gpu; count passed and skipped, and name those that failed."""
    if importlib.util.find_spec("pytest") is None:
        raise SkippedStep("pytest is not installed")
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not slow", f"--junitxml={report}", *paths]
    command.append("--continue-on-collection-errors")
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if not report.exists():
        raise UserError("pytest ended without a report; see above")
    found = count(report)
    if not found["passed"] and not found["wrong"]:
        raise SkippedStep(f"all {found['skipped']} tests were skipped")
    return found


def count(report: Path) -> dict[str, Any]:
    """Read the outcome from a JUnit file."""
    outcome: dict[str, Any] = {"passed": 0, "skipped": 0, "wrong": []}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        if tags & {"failure", "error"}:
            outcome["wrong"].append(f"{case.get('classname')}::{case.get('name')}")
        else:
            outcome["skipped" if "skipped" in tags else "passed"] += 1
    return outcome


def _dtype(device: str) -> str:
    return "bfloat16" if device == "cuda" else "float32"


class Step(NamedTuple):
    """A step, and the seconds after which it is ended."""

    run: Callable[[str, Path], dict[str, Any]]
    limit: float


STEPS = {
    "environment": Step(environment, 30),
    "backends": Step(backends, 50),
    "triton": Step(triton, 70),
    "ranks": Step(ranks, 40),
    "waits": Step(waits, 20),
    "attention": Step(attention, 60),
    "linear": Step(linear, 30),
    "training": Step(training, 90),
    "resume": Step(resume, 60),
    "profile": Step(profile, 30),
}
"""In the order of what only a GPU can show; what comes first needs least. Together 8 minutes."""
MORE = {"compiled": Step(compiled, 240)}
"""Run where they are asked for."""

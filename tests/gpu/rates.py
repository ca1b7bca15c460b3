"""Measure attention on one device: block kernels beside torch's own, and the ranks of a plan.

Ranks are measured without their traffic.
The same code runs on the CPU, as in its tests. What a device or a library refuses is listed under
``skipped`` with the reason and has no figure.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from bench.harness import MeasureError, forward_backward, target
from bench.shapes import MaskedShape
from kernels.attention import CAUSAL, select_backend
from kernels.backends import SOFTMAX
from kernels.blocks import Keys, Rows
from model.parts.attention import sdpa
from parallel.context.executor import Executor
from parallel.context.traffic import sizes
from runtime.machine import describe, time_steps
from tests.gpu.emulate import emulate
from tests.kernels.blocks import block_backward, block_forward
from tools.common.ceilings import ceilings
from tools.common.loopback import LoopbackTransport, step_of
from tools.common.shapes import BACKWARD_PRODUCTS, DTYPES, FORWARD_PRODUCTS

LENGTHS = (2048, 4096, 8192, 16384, 32768)
BACKENDS = {"cuda": tuple(name for name in SOFTMAX if name != "reference"), "cpu": ("aten",)}
WORST_ERROR = 2e-2
"""Relative difference from torch's own, in the 2-norm, beyond which a kernel is not timed."""
HALVES = ("forward", "backward")


def relative_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Return the largest relative difference of a pair of tensors in the 2-norm; NaN if any is."""
    pairs = ((a.double(), b.double()) for a, b in zip(got, want, strict=True))
    return torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max().item()


def measure(
    device: str,
    work: MaskedShape,
    lengths: tuple[int, ...],
    methods: tuple[str, ...],
    ranks: int,
    repeats: int,
) -> dict[str, Any]:
    """Measure ceilings, kernels at every length, and what ranks compute.

    A rank has ``work.seq_length`` positions.
    """
    skipped: dict[str, str] = {}
    kernels: list[dict[str, Any]] = []
    result = {
        "benchmark": "attention on one device, causal",
        "machine": describe(device),
        "ceilings": ceilings(device, (work.dtype,)),
        "workload": vars(work),
        "ranks": ranks,
        "kernels": kernels,
    }
    for length in lengths:
        kernels += kernels_of(device, replace(work, seq_length=length), repeats, skipped)
    shares = _try(
        "ranks", skipped, lambda: shares_of(device, work, methods, ranks, repeats, skipped)
    )
    return {**result, "ranks_of": shares or {}, "skipped": skipped}


def _try(
    label: str, skipped: dict[str, str], measured: Callable[[], dict[str, Any]]
) -> dict[str, Any] | None:
    """Return ``measured()``, or None and note the refusal.

    No memory, a missing library and an unsupported shape are refusals.
    """
    try:
        return measured()
    except torch.AcceleratorError:
        raise  # whatever comes after it fails too
    except Exception as error:  # Triton's own errors have no other base
        skipped[label] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None


def kernels_of(
    device: str, shape: MaskedShape, repeats: int, skipped: dict[str, str]
) -> list[dict[str, Any]]:
    """Time torch's own attention, then each of our backends."""
    q, k, v, dout = shape.tensors(device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    truth: list[Tensor] = []

    def peer() -> dict[str, Any]:
        out = sdpa(*leaves)
        truth[:] = [out.detach(), *torch.autograd.grad(out, leaves, dout, retain_graph=True)]
        backward = time_steps(
            lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), device, repeats
        )
        return _row("sdpa", shape, time_steps(lambda: sdpa(*leaves), device, repeats), backward)

    def ours(name: str) -> dict[str, Any]:
        backend, scale = select_backend(name, device, q.dtype), shape.head_dim**-0.5
        with torch.no_grad():
            out, lse = block_forward(q, k, v, CAUSAL, scale, backend)
            gradients = block_backward(Rows(q, dout, out, lse), Keys(k, v), CAUSAL, scale, backend)
            error = relative_error([out, *gradients], truth)
            if not error <= WORST_ERROR:
                raise MeasureError(
                    f"differs from scaled_dot_product_attention by {error:.1e} of the 2-norm"
                )
            forward = time_steps(
                lambda: block_forward(q, k, v, CAUSAL, scale, backend), device, repeats
            )
            backward = time_steps(
                lambda: block_backward(Rows(q, dout, out, lse), Keys(k, v), CAUSAL, scale, backend),
                device,
                repeats,
            )
        return _row(name, shape, forward, backward) | {"error": error}

    rows = [_try(f"sdpa at {shape.seq_length}", skipped, peer)]
    if truth:
        for name in BACKENDS[device]:
            rows.append(_try(f"{name} at {shape.seq_length}", skipped, partial(ours, name)))
    return [row for row in rows if row is not None]


def _row(
    name: str, shape: MaskedShape, forward: list[float], backward: list[float]
) -> dict[str, Any]:
    forward_seconds, back = median(forward), median(backward)
    return {
        "kernel": name,
        "seq_length": shape.seq_length,
        "forward_seconds": forward_seconds,
        "backward_seconds": back,
        "forward_tflops": shape.flops(shape.pairs, FORWARD_PRODUCTS) / forward_seconds / 1e12,
        "backward_tflops": shape.flops(shape.pairs, BACKWARD_PRODUCTS) / back / 1e12,
    }


def shares_of(
    device: str,
    local: MaskedShape,
    methods: tuple[str, ...],
    ranks: int,
    repeats: int,
    skipped: dict[str, str],
) -> dict[str, dict[str, Any]]:
    """Time what each rank computes by every method, forward + backward.

    A method is as fast as its slowest rank.

    ``of_share`` compares that with a rank's share of torch's own attention of the whole sequence on
    this device, and ``limit`` is the same by pairs.
    """
    whole, dtype = replace(local, seq_length=local.seq_length * ranks), DTYPES[local.dtype]
    share = (
        median(time_steps(forward_backward(sdpa, *whole.tensors(device)), device, repeats)) / ranks
    )
    figures: dict[str, dict[str, Any]] = {}
    for method in methods:
        plan = whole.plan(method, ranks)
        if plan.local_len != local.seq_length:
            skipped[f"ranks of {method}"] = (
                f"{local.seq_length} positions a rank would be padded to {plan.local_len}"
            )
            continue
        shape_sizes = sizes(
            plan.geometry,
            local.batch,
            local.num_heads,
            local.kv_heads,
            local.head_dim,
            dtype.itemsize,
        )
        slowest = float(emulate(plan, shape_sizes, device, dtype, repeats).max())
        pairs = [sum(step.pairs for step in plan.rounds(rank)) for rank in range(ranks)]
        rates = {
            "tflops": whole.flops(max(pairs)) / slowest / 1e12,
            "limit": fmean(pairs) / max(pairs),
        }
        figures[method] = {"slowest_seconds": slowest, "of_share": share / slowest, **rates}
    return figures


def masked(device: str, work: MaskedShape, repeats: int) -> dict[str, Any]:
    """Time a CAUSAL tile off the diagonal beside one on it, and packed documents beside one.

    Both are forward + backward.
    """
    q, k, v, dout = work.tensors(device)
    backend, scale = select_backend("auto", device, q.dtype), work.head_dim**-0.5

    def tile(rows: slice, columns: slice) -> float:
        local_q, keys = (q[:, rows], dout[:, rows]), Keys(k[:, columns], v[:, columns])

        def step() -> None:
            out, lse = block_forward(local_q[0], *keys, CAUSAL, scale, backend)
            block_backward(Rows(*local_q, out, lse), keys, CAUSAL, scale, backend)

        return median(time_steps(step, device, repeats))

    on, off = slice(0, work.seq_length - 1), slice(1, work.seq_length)
    tiles, rates = {"on the diagonal": tile(on, on), "off it": tile(off, on)}, dict[str, float]()
    for name, mask in {
        "one document": work,
        "packed": replace(work, documents="lognormal"),
    }.items():
        plan = mask.plan("zigzag", 1)
        executor = Executor(LoopbackTransport(plan.geometry, None, 0), "auto")
        seconds = median(time_steps(step_of(plan, executor, q, k, v, dout), device, repeats))
        rates[name] = mask.flops(mask.pairs) / seconds / 1e12
    return {
        "causal_tile_seconds": tiles,
        "off_the_diagonal": tiles["off it"] / tiles["on the diagonal"],
        "tflops": rates,
        "packed": rates["packed"] / rates["one document"],
    }


def targets(figures: dict[str, Any], chosen: str) -> list[dict[str, Any]]:
    """Return what is wanted of the figures of ``measure`` and ``masked``.

    ``chosen`` is the backend that auto takes.
    """
    rows, wanted_targets = figures["kernels"], list[dict[str, Any]]()
    seconds = {
        (row["kernel"], row["seq_length"]): (
            row["forward_seconds"],
            row["forward_seconds"] + row["backward_seconds"],
        )
        for row in rows
    }
    for length in {8192, 32768} & {row["seq_length"] for row in rows}:
        for half, pass_name in enumerate(("forward", "forward + backward")):
            others = (name for name in BACKENDS["cuda"] if name != "triton")
            best = [seconds[name, length][half] for name in others if (name, length) in seconds]
            for name, min_ratio in ((chosen, 1.0), ("triton", 0.75)):
                if best and (name, length) in seconds:
                    label = f"{name} over the best of the others, {length} tokens, {pass_name}"
                    wanted_targets.append(
                        target(label, min(best) / seconds[name, length][half], min_ratio)
                    )
    for method in ("zigzag", "striped"):
        if (share := figures["ranks_of"].get(method)) is not None:
            wanted_targets.append(
                target(
                    f"{method} ranks over their share of one GPU's attention",
                    share["of_share"],
                    0.95,
                )
            )
    wanted_targets.append(
        target(
            "a CAUSAL tile off the diagonal over one on it",
            figures["masked"]["off_the_diagonal"],
            0.97,
            1.03,
        )
    )
    return [
        *wanted_targets,
        target("packed documents over the dense rate", figures["masked"]["packed"], 0.85),
    ]


def told(result: dict[str, Any]) -> str:
    """Return a line for each kernel, each method's slowest rank, and what was skipped."""
    ceiling = result["ceilings"]["matmul_tflops"][result["workload"]["dtype"]]
    lines = [f"measured ceiling: {ceiling:.1f} TFLOP/s of matmul"]
    for row in result["kernels"]:
        halves = (
            f"{half} {row[f'{half}_seconds'] * 1e3:.3f} ms, {row[f'{half}_tflops']:.1f}"
            for half in HALVES
        )
        lines.append(f"{row['kernel']} at {row['seq_length']}: {' TFLOP/s; '.join(halves)} TFLOP/s")
    for name, row in result["ranks_of"].items():
        share = (
            f"{row['of_share']:.3f} of its share of one device's attention, "
            f"{row['limit']:.3f} "
            f"by pairs"
        )
        lines.append(
            f"{name}, slowest of {result['ranks']} ranks: {row['slowest_seconds'] * 1e3:.2f} "
            f"ms, {share}"
        )
    return "\n".join(
        [*lines, *(f"skipped: {label}: {reason}" for label, reason in result["skipped"].items())]
    )
